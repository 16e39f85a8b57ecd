"""Attention of a context-parallel group, rank by rank in one process: each over its own cache, merged.

Keys are written where each rank's ``slot_mapping`` says. A query sees the first so many of a rank's keys: tokens in a
row that see equally many are the queries of one request of a layer that is not causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.slices import HostArrays
from attncore.replay.layers.attention_layers import AttentionLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
    from torch import Tensor

    from attncore.abstract import AttentionBackend
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.token_content import Content


class ShardedLayers(AttentionLayers):
    """Layers with a cache for each of ``world_size`` ranks. Needs the ``reference`` backend's cross attention and
    log-sum-exp."""

    attn_type = "encoder_decoder"

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
        block_size = self.of_layer[0][1].config.block_size
        self.ranks = [ContextParallel(world_size, rank, block_size, interleave) for rank in range(world_size)]

    def attend(self, layer: int, tokens: list[Tensor], ranks: list[StepMetadata]) -> Tensor:
        """Each rank's output over its own cache, merged."""
        from attncore import merge
        from attncore.reference import cache as kv_cache

        query, key, value = tokens
        impl, from_host, parts = self.impls[layer], self.of_layer[layer][1].from_host, []
        for mine, metadata, cache in zip(self.ranks, ranks, self.kv_caches[layer], strict=True):
            kv_cache.write(key, value, cache, metadata.slot_mapping)
            parts.append(impl.forward_with_lse(query, None, None, cache, over_shard(metadata, mine, from_host)))
        return merge.merge_attention(*zip(*parts, strict=True))[0]


def over_shard(
    metadata: StepMetadata, mine: ContextParallel, from_host: Callable[[npt.NDArray[Any]], Tensor]
) -> CommonAttentionMetadata:
    """``metadata`` of rank ``mine``, its keys as those of an encoder that every query sees whole.

    ``from_host`` is the backend's: it takes host arrays to the device.
    """
    host = metadata.host
    owners, visible = host.token_to_req_indices, mine.seq_lens(host.positions + 1)
    differs = (owners[1:] != owners[:-1]) | (visible[1:] != visible[:-1])
    starts = np.flatnonzero(np.concatenate(([True], differs)))
    rows = len(starts)
    fields = HostArrays(
        query_start_loc=np.append(starts, len(owners)).astype(np.int32),
        encoder_seq_lens=visible[starts],
        encoder_query_lens=np.zeros(rows, np.int32),
        encoder_query_start_loc=np.zeros(rows + 1, np.int32),
        cross_slot_mapping=np.zeros(0, np.int64),
        cross_block_table=host.block_table[owners[starts]],
    )
    return CommonAttentionMetadata(fields, from_host, num_reqs=rows)
