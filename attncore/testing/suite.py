"""The conformance kit, adopted by a test file of two lines::

from attncore.testing.suite import *
BACKEND = "acme"
"""

from __future__ import annotations

from attncore.testing.checks import (
    adopted_steps,
    attend_without_writing,
    bidirectional_spans,
    captured_prompts,
    captured_settings,
    captured_sizes,
    contexts_in_chunks,
    cross_attention,
    crossed_settings,
    declared_sizes,
    draft_trees,
    dtypes_and_layouts,
    encoders,
    features,
    given_caches,
    host_lengths,
    kept_results,
    kv_cache,
    latent_attention,
    layers_together,
    list_builder,
    log_sum_exp,
    long_contexts,
    nan_canary,
    numerics,
    options,
    own_list_builder,
    padding,
    refusals,
    rounded_caches,
    scales,
    sinks,
    spec,
    stale_state,
    steps_built_ahead,
    strided_tensors,
    synchronisation,
    torch_graph,
    torch_operator,
)
from attncore.testing.harness.fixtures import attncore_captured_steps, attncore_examples, attncore_subject

CHECKS = (
    spec,
    declared_sizes,
    refusals,
    kv_cache,
    numerics,
    kept_results,
    long_contexts,
    strided_tensors,
    features,
    draft_trees,
    bidirectional_spans,
    layers_together,
    dtypes_and_layouts,
    given_caches,
    scales,
    sinks,
    rounded_caches,
    crossed_settings,
    latent_attention,
    encoders,
    cross_attention,
    attend_without_writing,
    log_sum_exp,
    contexts_in_chunks,
    nan_canary,
    stale_state,
    steps_built_ahead,
    host_lengths,
    padding,
    list_builder,
    own_list_builder,
    torch_operator,
    captured_sizes,
    captured_settings,
    captured_prompts,
    adopted_steps,
    options,
    synchronisation,
    torch_graph,
)
"""The modules whose tests are the kit's."""

pytest_plugins = ("attncore.testing.harness.pytest_plugin",)
"""pytest registers these when it imports the adopter's file: no entry point, no conftest."""

__all__ = ["attncore_captured_steps", "attncore_examples", "attncore_subject", "pytest_plugins"]

for _check in CHECKS:
    for _name in _check.__all__:
        globals()[_name] = getattr(_check, _name)
        __all__ += [_name]
