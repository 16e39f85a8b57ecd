"""The conformance kit, adopted by a test file of two lines::

from attncore.testing.suite import *
BACKEND = "acme"
"""

from __future__ import annotations

from attncore.testing.checks import captured_graph as check_device
from attncore.testing.checks import captured_sizes as check_captured
from attncore.testing.checks import encoders as check_encoder
from attncore.testing.checks import features as check_features
from attncore.testing.checks import kv_cache as check_cache
from attncore.testing.checks import latent_attention as check_latent
from attncore.testing.checks import list_builder as check_list_door
from attncore.testing.checks import log_sum_exp as check_lse
from attncore.testing.checks import nan_canary as check_canary
from attncore.testing.checks import numerics as check_numerics
from attncore.testing.checks import spec as check_spec
from attncore.testing.checks import step_to_step as check_state
from attncore.testing.checks import strided_tensors as check_strides
from attncore.testing.checks import torch_operator as check_operator
from attncore.testing.harness.fixtures import attncore_captured_steps, attncore_examples, attncore_subject

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

pytest_plugins = ("attncore.testing.harness.pytest_plugin",)
"""pytest registers these when it imports the adopter's file: no entry point, no conftest."""

__all__ = ["attncore_captured_steps", "attncore_examples", "attncore_subject", "pytest_plugins"]

for _check in CHECKS:
    for _name in _check.__all__:
        globals()[_name] = getattr(_check, _name)
        __all__ += [_name]
