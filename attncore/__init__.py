"""The attention-metadata layer of an LLM serving engine.

``select`` chooses a backend, a library of attention kernels, whose ``create`` loads it. An ``InputBatch`` keeps the
requests in flight, and a ``MetadataBuilder`` makes each step's metadata of it, which the backend's layers read::

    backend = attncore.select(num_heads=8, num_kv_heads=2, head_size=64, dtype="float32").create()
    batch = attncore.InputBatch(max_num_reqs=8, max_model_len=512, block_size=backend.config.block_size)
    builder = attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=256)
    batch.add_request("a", block_ids=[1, 2])
    metadata = builder.build({"a": 20})

``backends`` lists what is installed; ``CommonMetadataBuilder`` takes lists of ``SequenceGroup`` in place of a batch.
Names are imported when they are first used (PEP 562): importing attncore imports neither torch nor pluggy nor numba.
"""

from __future__ import annotations

import sys
from importlib import import_module

from attncore._version import __version__

TYPE_CHECKING = False  # typing's and logging's own import take ten times as long as this one's; Ctrl-C may come in them
if TYPE_CHECKING:
    from typing import Any

    from attncore.abstract import (
        AttentionBackend,
        AttentionImpl,
        AttentionLayer,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        BackendConfig,
        LayerFeatures,
        PlanKey,
    )
    from attncore.builder import (
        CommonAttentionMetadata,
        CommonAttentionState,
        CommonMetadataBuilder,
        InputBatch,
        KVCacheGroup,
        MetadataBuilder,
        Sequence,
        SequenceGroup,
        StateGroup,
    )
    from attncore.builder import CommonAttentionState as AttentionState
    from attncore.builder.adopted.steps import AdoptedSteps
    from attncore.errors import (
        AttncoreError,
        CaptureError,
        ConcurrentUseError,
        FallbackWarning,
        NoBackendError,
        PluginError,
    )
    from attncore.ops.cache_writer import CacheWriter
    from attncore.ops.forward_context import forward_context
    from attncore.ops.operator import attention
    from attncore.ops.sinks_by_lse import SinksByLse
    from attncore.registry.choice.choice import Choice
    from attncore.registry.choice.installed import backends
    from attncore.registry.choice.layers_choice import LayersChoice
    from attncore.registry.choice.prefill_decode_choice import JointChoice
    from attncore.registry.choice.select import select, select_for_layers, select_joint
    from attncore.registry.host.host import Host
    from attncore.registry.plugins.hookspecs import hookimpl
    from attncore.registry.reasons import Reason
    from attncore.registry.request import AttentionRequest
    from attncore.registry.spec.backend_spec import ATTNCORE_API, BackendSpec
    from attncore.registry.spec.option import Option
    from attncore.registry.spec.sizes import MultipleOf
    from attncore.registry.spec.variant import Variant
    from attncore.slots import (
        PAD_SLOT_ID,
        compute_slot_mapping,
        compute_slot_mapping_start_idx,
        is_block_tables_empty,
    )
    from attncore.versions import show_versions

__all__ = [
    "ATTNCORE_API",
    "PAD_SLOT_ID",
    "AdoptedSteps",
    "AttentionBackend",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionRequest",
    "AttentionState",
    "AttentionType",
    "AttncoreError",
    "BackendConfig",
    "BackendSpec",
    "CacheWriter",
    "CaptureError",
    "Choice",
    "CommonAttentionMetadata",
    "CommonAttentionState",
    "CommonMetadataBuilder",
    "ConcurrentUseError",
    "FallbackWarning",
    "Host",
    "InputBatch",
    "JointChoice",
    "KVCacheGroup",
    "LayerFeatures",
    "LayersChoice",
    "MetadataBuilder",
    "MultipleOf",
    "NoBackendError",
    "Option",
    "PlanKey",
    "PluginError",
    "Reason",
    "Sequence",
    "SequenceGroup",
    "SinksByLse",
    "StateGroup",
    "Variant",
    "__version__",
    "attention",
    "backends",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "forward_context",
    "hookimpl",
    "is_block_tables_empty",
    "select",
    "select_for_layers",
    "select_joint",
    "show_versions",
]

_HOMES = {
    "abstract": (
        "AttentionBackend AttentionImpl AttentionLayer AttentionMetadata AttentionMetadataBuilder "
        "AttentionType BackendConfig LayerFeatures PlanKey"
    ),
    "builder": (
        "CommonAttentionMetadata CommonAttentionState CommonMetadataBuilder InputBatch KVCacheGroup MetadataBuilder "
        "Sequence SequenceGroup StateGroup"
    ),
    "builder.adopted.steps": "AdoptedSteps",
    "builder.lists.capture_state": "AttentionState",
    "ops.cache_writer": "CacheWriter",
    "ops.forward_context": "forward_context",
    "ops.operator": "attention",
    "ops.sinks_by_lse": "SinksByLse",
    "errors": "AttncoreError CaptureError ConcurrentUseError FallbackWarning NoBackendError PluginError",
    "registry.choice.choice": "Choice",
    "registry.plugins.hookspecs": "hookimpl",
    "registry.choice.installed": "backends",
    "registry.host.host": "Host",
    "registry.choice.layers_choice": "LayersChoice",
    "registry.choice.prefill_decode_choice": "JointChoice",
    "registry.reasons": "Reason",
    "registry.request": "AttentionRequest",
    "registry.choice.select": "select select_for_layers select_joint",
    "registry.spec.sizes": "MultipleOf",
    "registry.spec.backend_spec": "ATTNCORE_API BackendSpec",
    "registry.spec.option": "Option",
    "registry.spec.variant": "Variant",
    "versions": "show_versions",
    "slots": "PAD_SLOT_ID compute_slot_mapping compute_slot_mapping_start_idx is_block_tables_empty",
}
_HOME = {name: f"attncore.{module}" for module, names in _HOMES.items() for name in names.split()}

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "attncore: this interpreter runs without the GIL, which attncore's kernels rely on; start it with PYTHON_GIL=1 "
        "or -X gil=1, or use the ordinary interpreter"
    )


if not TYPE_CHECKING:  # a checker knows the names from the imports above, and refuses others

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            from attncore.deprecated import DEPRECATED, renamed
            from attncore.did_you_mean import did_you_mean

            if f"attncore.{name}" in DEPRECATED:
                return renamed(name)
            hint = "" if name.startswith("_") else did_you_mean(name, _HOME)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
