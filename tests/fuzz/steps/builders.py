"""The builder of a program, and the backends that it builds for."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fuzz.steps.settings import MAX_ENCODER, MAX_REQS, MAX_TOKENS, Settings

from attncore import BackendConfig, MetadataBuilder, select
from attncore.builder import ContextParallel
from attncore.reference import ReferenceBackend

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Planning(ReferenceBackend):
    """``planned`` is called with each step."""

    has_plan = True
    planned: Callable[[Any], None]

    def plan(self, metadata: Any) -> None:
        self.planned(metadata)


def new_backends(settings: Settings, planned: Callable[[Any], None]) -> dict[str, Any]:
    """By group; each takes what the contract has, and reads the fields that ``device_needs`` name."""
    found = {}
    for name, group in settings.kernel_groups.items():
        config = _config(group.size // (settings.rank.world if settings.rank else 1), settings.device)
        spec = dataclasses.replace(
            config.spec, host_lengths="bounded", host_needs=frozenset(), device_needs=settings.device_needs[name],
            pad_seq_len=settings.pad_seq_len, cuda_graph="always",
        )  # fmt: skip
        config = dataclasses.replace(config, spec=spec)
        found[name] = (Planning if settings.planned else ReferenceBackend)(config)
        found[name].planned = planned
    return found


@functools.cache
def _config(block_size: int, device: str) -> BackendConfig:
    sizes: dict[str, Any] = {
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": "float32",
        "block_size": block_size,
    }
    return select(**sizes, backend="reference").create(device=device).config


def new_builder(
    settings: Settings, batch: Any, backends: dict[str, Any] | None, rejected: Any, patches: ExitStack
) -> MetadataBuilder:
    ranks = None
    if settings.rank:
        rank = settings.rank
        size = next(iter(settings.kernel_groups.values())).size // rank.world
        ranks = ContextParallel(rank.world, rank.rank, size, rank.interleave)
    if settings.transport == "graph" and settings.device == "cpu":  # what nodes do on a device is done by the host
        patches.enter_context(_nodes_on_host()(lambda call, name: call))
    of = backends and (next(iter(backends.values())) if len(backends) == 1 else backends)
    return MetadataBuilder(
        batch, of, max_num_batched_tokens=MAX_TOKENS, max_num_encoder_tokens=MAX_REQS * MAX_ENCODER,
        decode_threshold=settings.threshold, context_parallel=ranks, transport=settings.transport,
        num_rejected=rejected, draft_trees=settings.trees, depth=settings.depth,
    )  # fmt: skip


def _nodes_on_host() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from nodes_on_host import nodes_on_host
    finally:
        del sys.path[0]
    return nodes_on_host
