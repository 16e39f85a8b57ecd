"""The stand-in of FlashAttention 3."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from flash_standin_attention import NAN, attention, check_starts, check_table, loaded_tile, read_pages
from torch import Tensor

WINDOW_TILE = 16
"""Queries, and keys, of generation 3 in layers with a window."""
HIGHEST_SINK = 88
"""Above all scores of a query, of which the logarithm of the sum is a number."""


def _unmasked(queries: int, keys: int, left: int, right: int, end: int) -> Tensor:
    """bool (queries, keys): the tiles that vLLM's generation 3 leaves without their mask in a layer with a window.

    Its tiles of keys begin where the window of a tile's first query does. Which of them have keys behind a query, or
    before its window, it counts as if they began at the first key of a row, which ends at ``end``.
    """
    found = torch.zeros((queries, keys), dtype=torch.bool)
    for first in range(0, queries, WINDOW_TILE):
        last = first + WINDOW_TILE
        start = max(0, first + keys - queries - left)
        read = -(-min(keys - start, last + keys - start - queries + right) // WINDOW_TILE)
        behind = (first + end - queries + right) // WINDOW_TILE
        before = max(0, -(-(last + end - queries - left) // WINDOW_TILE))
        for tile in range(before, min(behind, read - 1)):  # the last one always has its mask
            found[first:last, start + tile * WINDOW_TILE : start + (tile + 1) * WINDOW_TILE] = True
    return found


class Generation3:
    """The operator of FlashAttention 3, as vLLM's wheel has it (``sinks``; it leaves masks out, too) or its own
    package; ``calls``: what it was given. ``lacks``: what the build leaves out.
    """

    def __init__(self, lacks: tuple[str, ...] = (), *, sinks: bool = True) -> None:
        self.lacks, self.sinks = lacks, sinks
        self.calls: list[dict[str, Any]] = []

    def library(self) -> Any:
        """What ``load`` gives."""
        from attn_flash.generation3 import Library

        if self.sinks:
            return Library(self.fwd, self.get_scheduler_metadata, (), lambda sinks, ends: (sinks, 1, 0, ends))
        return Library(self.own_fwd, None, (0,), lambda sinks, ends: ())

    def own_fwd(self, *given: Any) -> Any:
        """The package's own: a chunk length behind the window, nothing behind the margin."""
        if len(given) != 34 or given[27] != 0:
            raise RuntimeError("flash_attn_3::fwd takes 34 arguments, no chunks of attention among them")
        return self.fwd(*given[:27], *given[28:], None, 1, 0, None)

    def get_scheduler_metadata(
        self, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
        headdim_v: int, qkv_dtype: Any, seqused_k: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, cu_seqlens_k_new: Any,
        seqused_q: Any, leftpad_k: Any, page_size: Any, max_seqlen_k_new: int, is_causal: bool, window_size_left: int,
        window_size_right: int, has_softcap: bool, num_splits: int, pack_gqa: Any, sm_margin: int,
    ) -> Tensor:  # fmt: skip
        """A schedule: here all that it is good for, so that a call which is given another's raises."""
        sizes = (
            batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype.itemsize,
            page_size, is_causal, window_size_left, window_size_right, has_softcap,
        )  # fmt: skip
        return torch.cat([torch.tensor(sizes), seqused_k, cu_seqlens_q])

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, k_new: Any, v_new: Any, q_v: Any, out: Any, cu_seqlens_q: Any,
        cu_seqlens_k: Any, cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
        page_table: Any, kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any,
        q_descale: Any, k_descale: Any, v_descale: Any, softmax_scale: float, is_causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, is_rotary_interleaved: bool, scheduler_metadata: Any, num_splits: int,
        pack_gqa: Any, sm_margin: int, s_aux: Any, cp_world_size: int, cp_rank: int, cp_tot_seqused_k: Any,
    ) -> Any:  # fmt: skip
        """Rows of any lengths, over packed keys or a paged cache; queries of fp8 over a cache of fp8."""
        self.calls.append({name: part for name, part in locals().items() if name != "self"})
        fp8 = torch.float8_e4m3fn
        if (k_new, v_new, cu_seqlens_k_new, kv_batch_idx, leftpad_k, rotary_cos) != (None,) * 6:
            raise RuntimeError("this stand-in takes none of these")
        left = -1 if window_size_left >= max_seqlen_k - 1 else window_size_left
        if cp_tot_seqused_k is not None and left < 0:
            raise RuntimeError("rows end before every key, and no window counts them anew: nothing would be attended")
        if (cp_world_size, cp_rank, sm_margin) != (1, 0, 0):
            raise RuntimeError("When context parallelism is disabled, cp_rank must be zero")
        if q.dim() != 3 or cu_seqlens_q is None:
            raise RuntimeError("This flash attention build only supports varlen (for build size reasons).")
        check_table(page_table)
        if (cu_seqlens_k is None) == (page_table is None) or (page_table is None) != (seqused_k is None):
            raise RuntimeError("either packed keys with their starts, or pages with lengths")
        built = {"logits_soft_cap": softcap > 0, "sliding_window": window_size_left >= 0, "sinks": s_aux is not None}
        built |= {f"head_size {q.shape[-1]}": True, "fp8": q.dtype == fp8}
        for name, used in built.items():
            if used and name in self.lacks:
                raise RuntimeError(f"This flash attention build does not support {name}.")
        if q.dtype not in (torch.float16, torch.bfloat16, fp8) or k.dtype != q.dtype or v.dtype != q.dtype:
            raise RuntimeError("query, key and value must have the same dtype, fp16, bf16 or fp8_e4m3")
        if q.shape[-1] % (16 if q.dtype == fp8 else 8) or q.shape[-1] > 256:
            raise RuntimeError("head_size should be a multiple of 8 (16 for fp8), and 256 at most")
        if s_aux is not None and (s_aux.dtype != torch.bfloat16 or s_aux.shape != (q.shape[1],) or q.shape[1] > 64):
            raise RuntimeError("We only support bf16 dtype for S aux, and query heads <= 64")
        if q_v is None and v.shape[-1] != q.shape[-1]:
            raise RuntimeError("this stand-in takes values of another size beside queries of them (q_v) alone")
        if s_aux is not None and v.shape[-1] != q.shape[-1]:
            raise RuntimeError("We don't support S aux with hdim != hdim_v")
        if q_v is not None:
            if q.shape[-1] != 64 or v.shape[-1] != 512 or q_v.shape != (*q.shape[:2], 512):
                raise RuntimeError("q_v is for heads of 64 whose values have 512, as many as it has")
            if q.dtype == fp8 or q_v.dtype != q.dtype:
                raise RuntimeError("q_v is only supported for fp16 and bf16 data type, that of the query")
            if "kv_cache latent" in self.lacks:
                raise RuntimeError("This flash attention build does not support hdim 64 with values of 512.")
        if {part.stride(-1) for part in (q, k, v, q if q_v is None else q_v)} != {1}:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        check_starts(cu_seqlens_q, cu_seqlens_k, seqused_k)
        rows = len(cu_seqlens_q) - 1
        descales = [torch.ones(rows, k.shape[-2])] * 3
        if q.dtype == fp8:
            descales = [q_descale, k_descale, v_descale]
            if any(one.dtype != torch.float32 for one in descales):
                raise RuntimeError("expected scalar type Float")
            if any(one.shape != (rows, k.shape[-2]) for one in descales):
                raise RuntimeError("k_descale must have shape (batch_size, num_heads_k)")
        if scheduler_metadata is not None:
            sizes = (*q.shape[1:], v.shape[-1], q.dtype, seqused_k, cu_seqlens_q, None, None, None, None)
            wanted = self.get_scheduler_metadata(
                rows, max_seqlen_q, max_seqlen_k, sizes[0], k.shape[-2], *sizes[1:], k.shape[1], 0, is_causal,
                window_size_left, window_size_right, softcap > 0, 0, None, 0,
            )  # fmt: skip
            if not torch.equal(scheduler_metadata, wanted):
                raise RuntimeError("the schedule is of another step, or of a layer of another kind")
        starts = cu_seqlens_q.tolist()
        exact = torch.bfloat16 if q.dtype == fp8 else q.dtype
        found = torch.full((*q.shape[:2], v.shape[-1]), NAN, dtype=exact)
        found_lse = torch.full((q.shape[1], len(q)), NAN)
        for row in range(rows):
            mine = slice(starts[row], starts[row + 1])
            if page_table is None:
                one, other = cu_seqlens_k[row : row + 2].tolist()
                keys, values, length = (*loaded_tile(one, other, k, v), other - one)
                if length > max_seqlen_k:
                    raise RuntimeError("longer than max_seqlen_k")
            else:
                if len(page_table) != rows:
                    raise RuntimeError("page_table must have a row each")
                length = int(seqused_k[row])
                if length > max_seqlen_k:
                    raise RuntimeError("longer than max_seqlen_k, of which the number of splits is made")
                keys, values = (read_pages(part, page_table[row], length) for part in (k, v))
            if mine.stop - mine.start > max_seqlen_q:
                raise RuntimeError("longer than max_seqlen_q")
            keys, values = (
                part.float() * scale[row][None, :, None]
                for part, scale in zip((keys, values), descales[1:], strict=True)
            )
            if not length:  # nothing is attended, not even a sink
                found[mine], found_lse[:, mine] = 0.0, -torch.inf
                continue
            group = q.shape[1] // k.shape[-2]
            query = q[mine].float() * descales[0][row].repeat_interleave(group)[None, :, None]
            rest = 0.0 * values[length:].sum()  # weights of 0 times what lies there
            if q_v is not None:
                query, keys = torch.cat((query, q_v[mine].float()), -1), torch.cat((keys, values), -1)
            unmasked = None
            if left >= 0 and self.sinks and q_v is None:
                end = length if cp_tot_seqused_k is None else int(cp_tot_seqused_k[row])
                unmasked = _unmasked(len(query), length, left, 0 if is_causal else window_size_right, end)
            attend = partial(
                attention, query, keys[:length], values[:length], scale=softmax_scale, causal=is_causal,
                window=(window_size_left, window_size_right), softcap=softcap, unmasked=unmasked,
            )  # fmt: skip
            output, lse = attend(sinks=s_aux)
            if s_aux is not None:  # weights count from the largest score: a sink far above it has an infinite one
                lse = lse.masked_fill(s_aux.float() - attend()[1] > HIGHEST_SINK, torch.inf)
            found[mine], found_lse[:, mine] = (output + rest).to(exact), lse.transpose(0, 1)
        return [found, found_lse, q.new_empty(0), q.new_empty(0)]
