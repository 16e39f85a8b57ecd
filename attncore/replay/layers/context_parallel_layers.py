"""Attention of a context-parallel group, rank by rank in one process: each over its own cache, merged.

Each token of a step is a row of one query, as a decode is: it sees the first so many of a rank's keys, its own among
them where the rank keeps it (its slot is -1 where not). So any backend runs it that decodes and gives its log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.fields import COUNTS
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.slices import HostArrays
from attncore.kernels import host_functions
from attncore.replay.layers.attention_layers import AttentionLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
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


def token_rows(
    metadata: StepMetadata, mine: ContextParallel, from_host: Callable[[npt.NDArray[Any]], Tensor]
) -> CommonAttentionMetadata:
    """``metadata`` of rank ``mine`` with a decode of one token for each of its tokens.

    ``from_host`` is the backend's: it takes host arrays to the device.
    """
    host = metadata.host
    count = len(host.positions)
    slots = np.array(host.slot_mapping)
    kept = (slots >= 0).astype(np.int32)
    # A token that is written here is seen, even where the step is wrong and another rank should keep it.
    visible = np.maximum(mine.seq_lens(host.positions + 1), kept)
    rows = np.arange(count + 1, dtype=np.int32)
    fields = HostArrays(
        slot_mapping=slots,
        positions=np.array(host.positions),
        token_to_req_indices=rows[:-1],
        seq_lens=visible,
        context_lens=visible - kept,
        query_lens=np.ones(count, np.int32),
        query_start_loc=rows,
        logits_indices=rows[:-1],
        block_table=host.block_table[host.token_to_req_indices],
        seq_start_loc=host_functions.build_query_start_loc(visible),
    )
    pages = host_functions.build_page_lists(fields.block_table, visible, mine.block_size)
    fields.paged_kv_indptr, fields.paged_kv_indices, fields.paged_kv_last_page_len = pages
    longest = int(visible.max(initial=0))
    counts = dict.fromkeys(COUNTS, 0) | {
        "num_reqs": count, "num_tokens": count, "num_decodes": count, "num_decode_tokens": count, "max_query_len": 1,
        "max_decode_query_len": 1, "max_seq_len": longest, "max_decode_seq_len": longest, "use_cuda_graph": False,
    }  # fmt: skip
    return CommonAttentionMetadata(fields, from_host, **counts)
