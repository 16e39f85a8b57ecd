"""The stand-in of flash-attn 2."""

from __future__ import annotations

from typing import Any

import torch
from flash_standin_attention import NAN, attention, check_starts, check_table, read_pages
from torch import Tensor

BLOCK = 256
"""Sizes of a block are multiples of it."""


class Generation2:
    """flash-attn 2.8. ``lacks``: features and head sizes that the build leaves out; ``calls``: what it was given."""

    def __init__(self, lacks: tuple[str, ...] = (), *, waits: bool = False) -> None:
        self.lacks, self.waits = lacks, waits
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _checked(self, query: Tensor, softcap: float, window: Any, slopes: Any) -> None:
        built = {"logits_soft_cap": softcap > 0, "alibi": slopes is not None, "sliding_window": window[0] >= 0}
        for name, used in built.items():
            if used and name in self.lacks:
                raise RuntimeError(f"This flash attention build does not support {name}.")
        if f"head_size {query.shape[-1]}" in self.lacks or str(query.dtype) in self.lacks:
            raise RuntimeError(f"reduced build: {query.shape[-1]} or {query.dtype} was left out")
        if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8:
            raise RuntimeError("only fp16 and bf16, head sizes that are multiples of 8")
        if slopes is not None and (slopes.dtype != torch.float32 or slopes.shape != (query.shape[-2],)):
            raise RuntimeError("ALiBi slopes must have dtype fp32, one a head")

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        block_table: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Rows of one length over a paged cache."""
        self.calls.append(("with_kvcache", {name: part for name, part in locals().items() if name != "self"}))
        if self.waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        self._checked(q, softcap, window_size, alibi_slopes)
        check_starts(cache_seqlens)
        if k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        check_table(block_table)
        if len(block_table) != len(q) or len(cache_seqlens) != len(q):
            raise RuntimeError("block_table and seqlens_k must have a row for each of q")
        capacity = block_table.shape[1] * k_cache.shape[1]
        plain = window_size[0] < 0 or window_size[0] >= capacity
        outputs, lses = [], []
        for row, length in enumerate(cache_seqlens.tolist()):
            if length > capacity:
                raise RuntimeError("a sequence is longer than its table")
            keys, values = (read_pages(part, block_table[row], length)[:length] for part in (k_cache, v_cache))
            output, lse = attention(
                q[row], keys, values, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                slopes=alibi_slopes, from_start=causal and plain, tile=BLOCK,
            )  # fmt: skip
            outputs.append(output)
            lses.append(torch.where(lse.isinf(), torch.inf, lse).transpose(0, 1))
        return (torch.stack(outputs), torch.stack(lses)) if return_softmax_lse else torch.stack(outputs)

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
        return_attn_probs: bool = False, block_table: Any = None,
    ) -> Any:  # fmt: skip
        """Rows of any lengths, over packed keys or a paged cache."""
        self.calls.append(("varlen", {name: part for name, part in locals().items() if name != "self"}))
        self._checked(q, softcap, window_size, alibi_slopes)
        check_starts(cu_seqlens_q, cu_seqlens_k)
        rows = len(cu_seqlens_q) - 1
        starts = cu_seqlens_q.tolist()
        if max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and window_size[0] < 0 and alibi_slopes is None:
            if len(q) != rows:
                raise RuntimeError("shape is invalid: rows of one token each are expected")
            if return_attn_probs:
                raise RuntimeError("the log-sum-exp of rows of one token is laid out by head groups")
            starts = list(range(rows + 1))
        check_table(block_table)
        if block_table is not None and (k.shape[1] % 256 or len(block_table) != rows):
            raise RuntimeError("Paged KV cache block size must be divisible by 256, its table a row each")
        plain = window_size[0] < 0 or window_size[0] >= max_seqlen_k
        found, sums = torch.full_like(q, NAN), cu_seqlens_k.tolist()
        found_lse = torch.full((q.shape[1], len(q)), NAN)
        for row in range(rows):
            mine, length = slice(starts[row], starts[row + 1]), sums[row + 1] - sums[row]
            if mine.stop - mine.start > max_seqlen_q or length > max_seqlen_k:
                raise RuntimeError("a sequence is longer than max_seqlen says")
            if block_table is not None and mine.start < mine.stop and not length:
                raise RuntimeError("a row with queries and no keys: its logarithm is written outside of its tensor")
            if block_table is None:
                keys, values = k[sums[row] : sums[row + 1]], v[sums[row] : sums[row + 1]]
            else:
                keys, values = (read_pages(part, block_table[row], length)[:length] for part in (k, v))
            found[mine], lse = attention(
                q[mine], keys, values, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                slopes=alibi_slopes, from_start=causal and plain, tile=BLOCK,
            )  # fmt: skip
            found_lse[:, mine] = torch.where(lse.isinf(), torch.inf, lse).transpose(0, 1)
        return (found, found_lse, None) if return_attn_probs else found
