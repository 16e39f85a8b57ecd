"""The libraries' functions in torch, for machines without a GPU: their signatures, their rules, their traps.

Whatever a real kernel leaves unwritten is NaN here; whatever it reads beyond a sequence counts; arguments that it
refuses or misreads raise. ``test_signatures`` compares the signatures with the libraries' own sources.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attncore
from attncore import AttentionRequest, Host

NAN = float("nan")
TILE = 128
"""Keys that a kernel loads at a time."""
WINDOW_TILE = 16
"""Queries, and keys, of generation 3 in layers with a window."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, causal: bool,
    window: tuple[int | None, int | None], softcap: float, slopes: Tensor | None = None, sinks: Tensor | None = None,
    from_start: bool = False, tile: int = 0, unmasked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: query (q, heads, size), key and value (k, kv heads, size); output and log-sum-exp (q, heads).

    The mask is aligned to the last query and key. ``from_start``: slopes count from the first key, as causal ones do.
    Tiles of so many keys that lie before every query's window are not read; without ``tile`` they are multiplied by 0.
    ``unmasked``, bool (q, k): keys that a query sees in spite of the mask.
    """
    scale = query.shape[2] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(groups, dim=1) for part in (key, value))
    score = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    where = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = where - torch.arange(len(key))[None, :]
    if slopes is not None:
        bias = torch.arange(len(key))[None, :].expand_as(distance) if from_start else -distance.abs()
        score = score + slopes[:, None, None] * bias
    left, right = (None if side is None or side < 0 else side for side in window)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    if unmasked is not None:
        hidden &= ~unmasked
    if tile:
        before = int(hidden.all(dim=0).cumprod(0).sum())
        values[: before // tile * tile] = 0.0
    score = score.masked_fill(hidden, -torch.inf)
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
    weights = torch.exp(score - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype), lse.transpose(0, 1)


def _starts(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise RuntimeError("lengths and starts must be contiguous int32")


def _tile(first: int, last: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed rows first:last as kernels of generations 3 and 4 load them, up to the end of a tile."""
    return tuple(part[first : max(last, first + -(-(last - first) // TILE) * TILE)] for part in tensors)


def _pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    if not length:
        return cache.new_empty((0, *cache.shape[2:]))
    return torch.cat([cache[block] for block in table[: -(-length // cache.shape[1])].tolist()])


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
        _starts(cache_seqlens)
        if k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        _table(block_table)
        if len(block_table) != len(q) or len(cache_seqlens) != len(q):
            raise RuntimeError("block_table and seqlens_k must have a row for each of q")
        capacity = block_table.shape[1] * k_cache.shape[1]
        plain = window_size[0] < 0 or window_size[0] >= capacity
        outputs, lses = [], []
        for row, length in enumerate(cache_seqlens.tolist()):
            if length > capacity:
                raise RuntimeError("a sequence is longer than its table")
            keys, values = (_pages(part, block_table[row], length)[:length] for part in (k_cache, v_cache))
            output, lse = attention(
                q[row], keys, values, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                slopes=alibi_slopes, from_start=causal and plain, tile=BLOCK["2"],
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
        _starts(cu_seqlens_q, cu_seqlens_k)
        rows = len(cu_seqlens_q) - 1
        starts = cu_seqlens_q.tolist()
        if max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and window_size[0] < 0 and alibi_slopes is None:
            if len(q) != rows:
                raise RuntimeError("shape is invalid: rows of one token each are expected")
            if return_attn_probs:
                raise RuntimeError("the log-sum-exp of rows of one token is laid out by head groups")
            starts = list(range(rows + 1))
        _table(block_table)
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
                keys, values = (_pages(part, block_table[row], length)[:length] for part in (k, v))
            found[mine], lse = attention(
                q[mine], keys, values, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                slopes=alibi_slopes, from_start=causal and plain, tile=BLOCK["2"],
            )  # fmt: skip
            found_lse[:, mine] = torch.where(lse.isinf(), torch.inf, lse).transpose(0, 1)
        return (found, found_lse, None) if return_attn_probs else found


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
        _table(page_table)
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
        _starts(cu_seqlens_q, cu_seqlens_k, seqused_k)
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
                keys, values, length = (*_tile(one, other, k, v), other - one)
                if length > max_seqlen_k:
                    raise RuntimeError("longer than max_seqlen_k")
            else:
                if len(page_table) != rows:
                    raise RuntimeError("page_table must have a row each")
                length = int(seqused_k[row])
                if length > max_seqlen_k:
                    raise RuntimeError("longer than max_seqlen_k, of which the number of splits is made")
                keys, values = (_pages(part, page_table[row], length) for part in (k, v))
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
            output, lse = attention(
                query, keys[:length], values[:length], scale=softmax_scale, causal=is_causal,
                window=(window_size_left, window_size_right), softcap=softcap, sinks=s_aux, unmasked=unmasked,
            )  # fmt: skip
            found[mine], found_lse[:, mine] = (output + rest).to(exact), lse.transpose(0, 1)
        return [found, found_lse, q.new_empty(0), q.new_empty(0)]


class Generation4:
    """flash_attn.cute of flash-attn-4, as on sm_90; ``calls``: what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0,
        num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, score_mod: Any = None,
        score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
        aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
        seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: Any = None,
    ) -> Any:  # fmt: skip
        """Rows of one length (q of four dimensions) or of any, over packed keys or a paged cache."""
        self.calls.append(("varlen", {name: part for name, part in locals().items() if name != "self"}))
        _table(page_table)
        assert page_table is None or cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16"
        _starts(cu_seqlens_q, cu_seqlens_k, seqused_k)
        batched = q.dim() == 4
        flat = q.flatten(0, 1) if batched else q
        rows = len(q) if batched else len(cu_seqlens_q) - 1
        starts = [row * q.shape[1] for row in range(rows + 1)] if batched else cu_seqlens_q.tolist()
        found, found_lse = torch.full_like(flat, NAN), torch.full(flat.shape[:2], NAN)
        for row in range(rows):
            mine = slice(starts[row], starts[row + 1])
            if page_table is None:
                one, other = cu_seqlens_k[row : row + 2].tolist()
                keys, values, length = (*_tile(one, other, k, v), other - one)
            else:
                assert len(page_table) == rows, "page_table must have a row each"
                length = int(seqused_k[row])
                if mine.start < mine.stop and not length:
                    raise RuntimeError("a row with queries and no keys: the column before its table's first is read")
                keys, values = (_pages(part, page_table[row], length) for part in (k, v))
            assert mine.stop - mine.start <= max_seqlen_q, "longer than max_seqlen_q"
            assert length <= max_seqlen_k, "longer than max_seqlen_k"
            rest = 0.0 * values[length:].float().sum()  # weights of 0 times what lies there
            found[mine], found_lse[mine] = attention(
                flat[mine], keys[:length], values[:length], scale=softmax_scale, causal=causal, window=window_size,
                softcap=softcap, sinks=learnable_sink,
            )  # fmt: skip
            found[mine] += rest.to(found.dtype)
        if not batched:
            return found, found_lse.transpose(0, 1).contiguous() if return_lse else None
        lse = found_lse.unflatten(0, (rows, q.shape[1])).transpose(1, 2).contiguous()
        return found.view_as(q), lse if return_lse else None


def _table(table: Tensor | None) -> None:
    if table is not None and table.stride(-1) != 1:
        raise RuntimeError(f"block_table must have contiguous last dimension, not {table.shape} {table.stride()}")


def install(monkeypatch: Any, generation: str, library: Any) -> Any:
    """``library`` in place of the generation's own."""
    from attn_flash.generations import MODULES

    given = library.library() if generation.startswith("3") else library
    monkeypatch.setattr(MODULES[generation], "load", lambda: given)
    return library


MADE: dict[str, Any] = {
    "2": Generation2,
    "3": lambda: Generation3(sinks=False),
    "3_vllm": Generation3,
    "4": Generation4,
}
"""Generation -> what makes its stand-in."""

PACKAGES = {
    "2": {"flash-attn": "2.8.3.post2"},
    "3": {"flash-attn-3": "3.0.0"},
    "3_vllm": {"vllm": "0.33.0"},
    "4": {"flash-attn-4": "4.0.0b36"},
}
"""What a host has that has one generation only."""


def packages(*generations: str) -> dict[str, str]:
    """Versions of a host that has these generations, and no other."""
    known = {"flash-attn": "", "flash-attn-4": "", "flash-attn-3": "", "vllm": "", "torch": "2.11.0"}
    for generation in generations:
        known |= PACKAGES[generation]
    return known


BLOCK = {"2": 256, "3": 16, "3_vllm": 16, "4": 16}
"""A block size of each generation."""


def create(generation: str, **fields: Any) -> Any:
    """A small backend of an assumed H100 that has this generation, on the CPU."""
    request = AttentionRequest(
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16", "backend": "flash",
           "block_size": BLOCK[generation], **fields}
    )  # fmt: skip
    host = Host.assume("sm_90", packages=packages(generation))
    return attncore.select(request, host=host).create(device="cpu")


def forget_calls(backend: Any) -> None:
    """Drops what a backend's stand-in was given: it keeps the tensors."""
    library = backend._library
    getattr(getattr(library, "forward", None), "__self__", library).calls.clear()
