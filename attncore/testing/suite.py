"""The conformance kit, adopted by a test file of two lines::

from attncore.testing.suite import *
BACKEND = "acme"
"""

from __future__ import annotations

from attncore.testing import (
    check_cache,
    check_canary,
    check_captured,
    check_device,
    check_encoder,
    check_features,
    check_latent,
    check_list_door,
    check_lse,
    check_numerics,
    check_operator,
    check_spec,
    check_state,
    check_strides,
)
from attncore.testing.fixtures import attncore_captured_steps, attncore_examples, attncore_subject

CHECKS = (
    check_spec,
    check_cache,
    check_numerics,
    check_strides,
    check_features,
    check_latent,
    check_encoder,
    check_lse,
    check_canary,
    check_state,
    check_list_door,
    check_operator,
    check_captured,
    check_device,
)

pytest_plugins = ("attncore.testing.plugin",)
"""pytest registers these when it imports the adopter's file: no entry point, no conftest."""

__all__ = ["attncore_captured_steps", "attncore_examples", "attncore_subject", "pytest_plugins"]

for _check in CHECKS:
    for _name in _check.__all__:
        globals()[_name] = getattr(_check, _name)
        __all__ += [_name]
