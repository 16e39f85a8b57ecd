"""Attention of a context-parallel group, rank by rank in one process: each over its own cache, merged.

Each token of a step is a row of one query, as a decode is: it sees the first so many of a rank's keys, its own among
them where the rank keeps it (its slot is -1 where not). So any backend runs it that decodes and gives its log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.blocks.rank_steps import token_rows
from attncore.replay.layers.attention_layers import AttentionLayers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attncore.abstract import AttentionBackend
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.token_content import Content


class ShardedLayers(AttentionLayers):
    """Layers with a cache for each of ``world_size`` ranks, of backends that have the feature ``lse``."""

    def __init__(
        self,
        backend: AttentionBackend | Mapping[str, AttentionBackend],
        content: Content,
        num_layers: int,
        num_blocks: int,
        windows: Mapping[str, int | None] | None = None,
        *,
        world_size: int,
        interleave: int = 1,
    ) -> None:
        self.num_caches = world_size
        super().__init__(backend, content, num_layers, num_blocks, windows)
        self.backend = None  # the ranks' builders plan nothing: what is planned are the rows that are made here
        block_size = self.of_layer[0][1].config.block_size
        self.ranks = [ContextParallel(world_size, rank, block_size, interleave) for rank in range(world_size)]

    def attend(self, layer: int, tokens: list[Tensor], ranks: list[StepMetadata]) -> Tensor:
        """Each rank's output over its own cache, merged."""
        from attncore.merge import merge_attention

        (query, key, value), parts = tokens, []
        impl, backend = self.impls[layer], self.of_layer[layer][1]
        for mine, metadata, cache in zip(self.ranks, ranks, self.kv_caches[layer], strict=True):
            rows = token_rows(metadata, mine, backend.from_host)
            backend.plan(rows)  # right before it runs: a plan may be that of the last step planned
            parts.append(impl.forward_with_lse(query, key, value, cache, rows))
        return merge_attention(*zip(*parts, strict=True))[0]
