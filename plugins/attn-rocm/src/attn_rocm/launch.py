"""Attention of a step by the plugin's Triton kernels: tensors in, launches out. Nothing here waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_rocm import tiles
from attn_rocm.kernels.merge import merge_splits
from attn_rocm.kernels.unified import unified_attention

LOG2E = math.log2(math.e)
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
ALL_TOKENS = 1 << 30
"""A window that no request is longer than; with larger ones positions and windows together do not fit int32."""
LARGE_CAP = 64.0
"""A soft cap above which tanh is calculated with the last places of small scores: a quarter more of a prompt's time."""
NO_CAP = 1e30
"""A soft cap that no score comes near; larger ones, times log2(e), do not fit float32."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a layer asks of the kernels. ``slopes``, times log2(e), and ``sinks`` are float32 (heads,) on the device;
    the scales are floats, or float32 (1,) or (kv heads,) there. The kernel reads tensors each time that it runs."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    causal: bool = True


@dataclass(frozen=True, eq=False)
class Keys:
    """Where a step's keys are. Caches are views (blocks, block size, kv heads, size), the last dimension contiguous.

    ``table`` int32 (sequences, width) or None, ``lengths`` int32 (sequences,): keys of each. Of the first ``raw_rows``
    sequences the last keys are those of this step, ``key`` and ``value`` (tokens, kv heads, size) from ``raw_starts``
    int32 (sequences + 1,); where there is no table these are all. ``written``: but of a sequence that has other keys
    too all are in the cache. ``tree_mask`` int64 (tokens,) or None: which of its sequence's tokens in this step each
    token sees; ``span_ends`` int32 (tokens,) or None: the key behind those of this step that see each other with it.
    Both of a layer that is causal.
    """

    lengths: Tensor
    longest: int
    key_cache: Tensor | None = None
    value_cache: Tensor | None = None
    table: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    raw_starts: Tensor | None = None
    raw_rows: int = 0
    written: bool = False
    tree_mask: Tensor | None = None
    span_ends: Tensor | None = None


class Launcher:
    """Launches for one configuration of heads on one device."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, arch: str, units: int = 0) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.group = num_heads // num_kv_heads
        self.padded_size = max(16, tiles.power_of_two(head_size))
        self.arch, self.units = arch, units or tiles.architecture(arch).units
        self.interpreted = arch == "cpu"
        self._tile = lru_cache(maxsize=None)(self._find_tile)

    def _find_tile(self, decode: bool, itemsize: int) -> tiles.Tile:
        return tiles.tile(self.arch, group=self.group, padded_size=self.padded_size, itemsize=itemsize, decode=decode)

    def __call__(
        self,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        starts: Tensor,
        keys: Keys,
        scoring: Scoring,
        *,
        most_queries: int,
        one_token_each: bool = False,
    ) -> None:
        """Attention of ``query`` (tokens, heads, size), whose sequences begin at ``starts`` int32 (sequences + 1,).

        Fills ``output``, and ``lse`` float32 (tokens, heads) where one is given; tokens behind the last sequence get
        zeros. ``most_queries`` bounds the queries of a sequence; ``one_token_each``: token i is sequence i.
        """
        num_tokens, num_seqs = len(query), len(starts) - 1
        if not num_tokens:
            return
        if not num_seqs:  # nothing but padding
            output.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
            return
        tile = self._tile(True, query.element_size())
        few = most_queries * tile.heads(self.group) <= tile.rows
        if not few:
            tile = self._tile(False, query.element_size())
        heads = tile.heads(self.group)
        programs = self.num_kv_heads * -(-self.group // heads)
        blocks = num_tokens if one_token_each else num_tokens // (tile.rows // heads) + num_seqs + 1
        splits = 1
        if few and not keys.raw_rows:
            reach = keys.longest if scoring.window is None else min(keys.longest, scoring.window + most_queries)
            splits = tiles.num_splits(num_seqs * programs, self.units, reach, tile.keys)
        out, out_lse, strides = output, lse, output.stride()
        if splits > 1:
            shape = (num_tokens, self.num_heads, splits)
            out = query.new_empty((*shape, self.padded_size), dtype=torch.float32)
            out_lse = query.new_empty(shape, dtype=torch.float32)
        self._attend(
            query, out, out_lse, starts, keys, scoring, tile=tile, heads=heads, grid=(blocks, programs, splits),
            num_seqs=num_seqs, decode=one_token_each,
        )  # fmt: skip
        if splits > 1:
            merge_splits[(num_tokens, self.num_heads)](
                out, out_lse, output, lse, strides[0], strides[1], HEADS=self.num_heads, SIZE=self.head_size,
                D=self.padded_size, SPLITS=splits, LSE=lse is not None, num_warps=4,
            )  # fmt: skip

    def _attend(
        self, query: Tensor, out: Tensor, lse: Tensor | None, starts: Tensor, keys: Keys, scoring: Scoring, *,
        tile: tiles.Tile, heads: int, grid: tuple[int, int, int], num_seqs: int, decode: bool,
    ) -> None:  # fmt: skip
        key_cache, value_cache, table = keys.key_cache, keys.value_cache, keys.table
        fp8, page = "", 1
        kc: tuple[int, ...] = (0, 0, 0)
        vc: tuple[int, ...] = (0, 0, 0)
        if key_cache is not None and value_cache is not None:
            page, fp8 = key_cache.shape[1], FP8.get(key_cache.dtype, "")
            kc, vc = key_cache.stride()[:3], value_cache.stride()[:3]
            if fp8:
                key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        key_strides = keys.key.stride()[:2] if keys.key is not None else (0, 0)
        value_strides = keys.value.stride()[:2] if keys.value is not None else (0, 0)
        scale, cap = scoring.scale * LOG2E, 0.0
        if scoring.soft_cap is not None:
            soft_cap = min(scoring.soft_cap, NO_CAP)
            scale, cap = 2 * scale / soft_cap, soft_cap * LOG2E
        # The kernel multiplies by a number, or by what it finds at an address: one for all heads, or each head's own.
        k_number, k_tensor, k_scales = _passed(scoring.k_scale)
        v_number, v_tensor, v_scales = _passed(scoring.v_scale)
        pointers = (
            query, key_cache, value_cache, keys.key, keys.value, out, lse, table, keys.lengths, starts,
            keys.raw_starts, scoring.slopes, scoring.sinks, k_tensor, v_tensor, keys.tree_mask,
            keys.span_ends,
        )  # fmt: skip
        numbers = (
            scale * k_number, scale, v_number, cap, num_seqs, len(query), keys.raw_rows,
            min(scoring.window or 0, ALL_TOKENS), 0 if table is None else table.stride(0),
        )  # fmt: skip
        strides = (*query.stride()[:2], *kc, *vc, *key_strides, *value_strides, *out.stride()[:2])
        of_heads = query.stride(1), kc[2], vc[2], key_strides[1], value_strides[1], out.stride(1)
        wide = (self.num_heads - 1) * max(of_heads) >= 2**31 or (page - 1) * max(kc[1], vc[1]) >= 2**31
        unified_attention[grid](
            *pointers, *numbers, *strides,
            HEADS=self.num_heads, GROUP=self.group, SIZE=self.head_size, PAGE=page,
            ROWS=tile.rows, D=self.padded_size, N=tile.keys, SPLITS=grid[2],
            DECODE=decode, CAUSAL=scoring.causal, TABLE=table is not None, RAW=keys.raw_rows > 0,
            WRITTEN=keys.written, FP8=fp8,
            WINDOW=scoring.window is not None, SOFT_CAP=_kind_of_cap(scoring.soft_cap),
            ALIBI=scoring.slopes is not None, SINKS=scoring.sinks is not None, LSE=lse is not None,
            K_SCALES=k_scales, V_SCALES=v_scales, TREE=keys.tree_mask is not None,
            SPANS=keys.span_ends is not None,
            INTERPRET=self.interpreted, TAKEN=heads, SLICE=tile.slice, WIDE=wide,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _kind_of_cap(cap: float | None) -> int:
    """What the kernel calls ``SOFT_CAP``. Up to LARGE_CAP the cheap formula is right to some millionths of a score."""
    if cap is None:
        return 0
    return 1 if cap <= LARGE_CAP else 2


def _passed(scale: float | Tensor) -> tuple[float, Tensor | None, int]:
    """A scale as the kernel takes it: a number, an address, and which of the two it is (0: the number)."""
    if isinstance(scale, float):
        return scale, None, 0
    return 1.0, scale, 1 if scale.numel() == 1 else 2
