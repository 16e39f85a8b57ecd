"""Decodes without a plan: XQA, which takes the block table and the lengths where they are, on the device."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attn_flashinfer.library import Library
from attn_flashinfer.wrappers import LayerSettings
from attncore import AttentionMetadata

WORKSPACE_BYTES = 128 << 20
"""8 MiB of semaphores, which must be 0 at first, and room for what long contexts are split into."""


def workspace(device: str) -> Tensor:
    """The memory that XQA works in: for all layers, one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class XqaDecode:
    """The decodes first..last of a step. Nothing of the step is read before ``run``."""

    def __init__(
        self,
        library: Library,
        memory: Tensor,
        settings: LayerSettings,
        metadata: AttentionMetadata,
        first: int,
        last: int,
    ) -> None:
        self._library, self._memory, self._settings = library, memory, settings
        self._metadata, self._rows = ref(metadata), (first, last)  # a plan does not keep its step, nor the builder
        self._read: tuple[Tensor, Tensor] | None = None

    def run(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float | Tensor = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends for one token a request; ``out`` is written and returned."""
        if return_lse:
            raise ValueError("forward_with_lse: decode=xqa returns no log-sum-exp; choose another kernel of decodes")
        if self._read is None:
            first, last = self._rows
            metadata: Any = self._metadata()
            self._read = metadata.block_table[first:last], metadata.seq_lens[first:last]
            self._longest = metadata.max_seq_len
        table, seq_lens = self._read
        settings = self._settings
        self._library.xqa(
            query.contiguous(),  # of the tensors it takes, XQA asks the caches alone for their strides
            caches,
            self._memory,
            table.contiguous(),  # an engine's own may have any; copied in each run, for a graph reads it in each replay
            seq_lens,
            self._longest,
            bmm1_scale=settings.scale * k_scale,
            bmm2_scale=v_scale,
            window_left=-1 if settings.window is None else settings.window - 1,
            out=out,
            sinks=sinks,
            kv_layout=settings.shape.layout,
        )
        return out
