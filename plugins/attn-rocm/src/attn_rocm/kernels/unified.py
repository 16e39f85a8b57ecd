"""Paged attention in one launch: prompts, chunks, prefix hits and decodes, and layers that are not causal."""

# Names in capitals are compile-time constants, as is the habit in Triton.
# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from attn_rocm.kernels.tile import attend_tile, stored

#: Numbers that change from step to step: a kernel must not be compiled again because one of them is 1, or even.
STEP_NUMBERS = ["num_seqs", "num_tokens", "raw_rows", "window", "table_stride"]
#: Addresses within arenas and fused tensors: nor because one of them is aligned in another way.
STEP_POINTERS = ["table_ptr", "lengths_ptr", "starts_ptr", "key_starts_ptr", "tree_ptr", "span_ptr"]


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
def unified_attention(
    query_ptr, key_cache_ptr, value_cache_ptr, key_ptr, value_ptr, out_ptr, lse_ptr,
    table_ptr, lengths_ptr, starts_ptr, key_starts_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, tree_ptr,
    span_ptr,
    scale, raw_scale, v_scale, cap,
    num_seqs, num_tokens, raw_rows, window, table_stride,
    query_token, query_head, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
    key_token, key_head, value_token, value_head, out_token, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    DECODE: tl.constexpr, CAUSAL: tl.constexpr, TABLE: tl.constexpr, RAW: tl.constexpr, FP8: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, TREE: tl.constexpr, SPANS: tl.constexpr,
    INTERPRET: tl.constexpr, TAKEN: tl.constexpr, SLICE: tl.constexpr, WRITTEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs (block of queries, kv head and part of its group, split). A block is ``ROWS // TAKEN`` queries of one
    sequence times ``TAKEN`` of the ``GROUP`` heads that share keys; tokens behind the last sequence are blocks of a
    sequence without keys. ``SLICE``: see ``attend_tile``.

    Sequence s has tokens ``starts[s]`` to ``starts[s + 1]`` and ``lengths[s]`` keys, of which its tokens are the last.
    Keys come from the cache by the block table, but with RAW, of the first ``raw_rows`` sequences, those of this step
    (``key_starts``) as they came; with ``WRITTEN`` only of a sequence that has no others. ``DECODE``: token i is
    sequence i, so that nothing is searched. With ``SPLITS`` above 1 each program takes a part of the keys and leaves
    float32 partial results for ``merge_splits``: ``out`` is then (tokens, heads, splits, D) and ``lse``, to base 2,
    (tokens, heads, splits). ``K_SCALES`` and ``V_SCALES``: what the cache holds is times 0, a number that ``scale`` and
    ``v_scale`` have; 1, the one at ``k_scale_ptr``; 2, its head's. ``TREE``: tokens have masks at ``tree_ptr``, int64,
    by which they see some of their sequence's tokens alone. ``SPANS``: at ``span_ptr``, int32, is the key behind the
    span of each token, or 0; tokens that have the same see each other. Of a layer that is causal. ``WIDE``: whether a
    head, or a token of a block, may be further from the first than int32 holds; offsets of int64 take up to a sixth of
    a step (benchmarks/results/gpu/rocm_offsets_20261130.json). ``SOFT_CAP``: see ``attend_tile``.
    """
    BLOCK: tl.constexpr = ROWS // TAKEN
    PARTS: tl.constexpr = (GROUP + TAKEN - 1) // TAKEN
    block, kv_head, split = tl.program_id(0), tl.program_id(1) // PARTS, tl.program_id(2)

    # Which sequence, and which of its queries.
    if DECODE:
        seq, first = block, 0
    else:
        seq, high = 0, num_seqs
        while seq < high:  # the last one whose first block is not after this one; num_seqs: behind all of them
            middle = (seq + high + 1) // 2
            before = tl.load(starts_ptr + middle) // BLOCK + middle <= block
            seq, high = tl.where(before, middle, seq), tl.where(before, high, middle - 1)
        first = (block - tl.load(starts_ptr + seq) // BLOCK - seq) * BLOCK
    is_seq = seq < num_seqs
    if DECODE:
        start = seq
        count = tl.load(starts_ptr + seq + 1, mask=is_seq, other=0) - tl.load(starts_ptr + seq, mask=is_seq, other=0)
        length = tl.load(lengths_ptr + seq, mask=is_seq & (count > 0), other=0)
        count = 1
    else:
        start = tl.load(starts_ptr + seq)
        count = tl.load(starts_ptr + seq + 1, mask=is_seq, other=num_tokens) - start
        length = tl.load(lengths_ptr + seq, mask=is_seq, other=0)
    if first >= count:
        return
    cached = length
    if RAW:
        fresh_start = tl.load(key_starts_ptr + seq, mask=seq < raw_rows, other=0)
        fresh = tl.load(key_starts_ptr + seq + 1, mask=seq < raw_rows, other=0) - fresh_start
        if not TABLE:  # a profiling run: there is nothing but what this step brings
            length = fresh
        if WRITTEN:
            fresh = tl.where(length > fresh, 0, fresh)
        cached = length - fresh

    # Which keys: those that some query of the block sees, and of them this split's.
    position = first + length - count  # of the block's first query
    if not CAUSAL:
        position = first
    low, end = 0, length
    if CAUSAL:
        end = tl.minimum(length, position + BLOCK)
    context = length - count  # keys of earlier steps
    span = tl.zeros([ROWS], tl.int32)
    if SPANS:
        query_of_row = first + tl.arange(0, ROWS) // TAKEN
        in_block = (tl.arange(0, ROWS) < BLOCK * TAKEN) & (query_of_row < count) & is_seq
        span = tl.load(span_ptr + start + query_of_row, mask=in_block, other=0)
        end = tl.minimum(length, tl.maximum(end, tl.max(span, 0)))
    if WINDOW:
        low = tl.maximum(0, position - window + 1)
        if TREE:  # a tree's tokens stand by depth: its root's window begins first
            in_tree = tl.load(tree_ptr + start + first, mask=is_seq, other=0) != 0
            low = tl.where(in_tree, tl.maximum(0, context - window + 1), low)
        if SPANS:  # only the span of the first query may begin before the window of the block
            own = tl.load(span_ptr + start + first, mask=is_seq, other=0)
            # In steps of a tile, so that few loads wait for each other: what is read too much is masked.
            before = tl.load(span_ptr + start - context + low - 1, mask=is_seq & (low > context), other=0)
            while (own > 0) & (before == own):
                low = tl.maximum(context, low - N)
                before = tl.load(span_ptr + start - context + low - 1, mask=is_seq & (low > context), other=0)
        if not CAUSAL:
            end = tl.minimum(length, position + BLOCK + window - 1)
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), N), SPLITS) * N
        low = low + split * share
        end = tl.minimum(end, low + share)

    row = tl.arange(0, ROWS)
    token = start + first + row // TAKEN
    member = row % TAKEN
    is_row = (row < BLOCK * TAKEN) & (first + row // TAKEN < count)
    if PARTS > 1:
        member += tl.program_id(1) % PARTS * TAKEN
        is_row = is_row & (member < GROUP)
    head = kv_head * GROUP + member
    at, head_at, kv_head_at = token.to(tl.int64), head, kv_head
    if WIDE:
        head_at, kv_head_at = head.to(tl.int64), kv_head.to(tl.int64)
    if SPLITS > 1:
        lse_at = (at * HEADS + head) * SPLITS + split
        if (low >= end) & (split > 0):
            tl.store(lse_ptr + lse_at, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
            return

    d = tl.arange(0, D)
    is_d = d < SIZE
    query = tl.load(
        query_ptr + (at * query_token + head_at * query_head)[:, None] + d[None, :],
        mask=is_row[:, None] & is_d[None, :],
        other=0.0,
    )
    if INTERPRET:  # Triton's interpreter multiplies bfloat16 wrongly
        query = query.to(tl.float32)
    query_at = position + row // TAKEN
    tree = tl.zeros([ROWS], tl.uint64)
    if TREE:
        tree = tl.load(tree_ptr + at, mask=is_row & is_seq, other=0).to(tl.uint64)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=is_row, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a logit that joins the softmax, once
        if split == 0:
            # To base 2, as scores are. Here and not on the host: a captured graph sees the layer's own.
            peak = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * 1.4426950408889634
            total += 1.0
    acc = tl.zeros([ROWS, D], tl.float32)

    n = tl.arange(0, N)
    span_at = start - context  # where the end of key 0 would be, were it of this step
    if K_SCALES > 0:  # read here and not on the host: a captured graph sees what is there when it is replayed
        scale = raw_scale * tl.load(k_scale_ptr + kv_head * (K_SCALES - 1))
    if V_SCALES > 0:
        v_scale = tl.load(v_scale_ptr + kv_head * (V_SCALES - 1))
    if TABLE:
        stop = tl.minimum(end, cached)
        table_ptr += seq.to(tl.int64) * table_stride
        key_cache_ptr += kv_head_at * kc_head
        value_cache_ptr += kv_head_at * vc_head
        if INTERPRET:  # its range() takes no loaded bound under recent NumPy
            tile = low
            while tile < stop:
                peak, total, acc = _cached_tile(
                    peak, total, acc, query, key_cache_ptr, value_cache_ptr, table_ptr, query_at, tile + n, stop,
                    scale, cap, slope, window, tree, context, span, span_ptr, span_at, kc_block, kc_slot, vc_block,
                    vc_slot, d, is_d, PAGE, SIZE == D, CAUSAL, WINDOW, SOFT_CAP, ALIBI, FP8, INTERPRET, SLICE, TREE,
                    SPANS, WIDE,
                )  # fmt: skip
                tile += N
        else:
            for tile in tl.range(low, stop, N):
                peak, total, acc = _cached_tile(
                    peak, total, acc, query, key_cache_ptr, value_cache_ptr, table_ptr, query_at, tile + n, stop,
                    scale, cap, slope, window, tree, context, span, span_ptr, span_at, kc_block, kc_slot, vc_block,
                    vc_slot, d, is_d, PAGE, SIZE == D, CAUSAL, WINDOW, SOFT_CAP, ALIBI, FP8, INTERPRET, SLICE, TREE,
                    SPANS, WIDE,
                )  # fmt: skip
        if FP8 != "":
            acc = acc * v_scale
    if RAW:
        tile = tl.maximum(low, cached)
        while tile < end:
            key_at = tile + n
            fresh_at = (fresh_start + key_at - cached).to(tl.int64)
            is_key = key_at < end
            key = tl.load(
                key_ptr + (fresh_at * key_token + kv_head_at * key_head)[None, :] + d[:, None],
                mask=is_key[None, :] & is_d[:, None],
                other=0.0,
            )
            value = tl.load(
                value_ptr + (fresh_at * value_token + kv_head_at * value_head)[:, None] + d[None, :],
                mask=is_key[:, None] & is_d[None, :],
                other=0.0,
            )
            key_span = tl.zeros([N], tl.int32)
            if SPANS:
                key_span = tl.load(span_ptr + span_at + key_at, mask=is_key & (key_at >= context), other=0)
            peak, total, acc = attend_tile(
                peak, total, acc, query, stored(key, "", INTERPRET, query), stored(value, "", INTERPRET, query),
                query_at, key_at, end, raw_scale, cap, slope, window, tree, context, span, key_span, CAUSAL, WINDOW,
                SOFT_CAP, ALIBI, SLICE, TREE, SPANS,
            )  # fmt: skip
            tile += N

    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    out_mask = is_row[:, None] & is_d[None, :]
    if SPLITS > 1:
        tl.store(lse_ptr + lse_at, lse, mask=is_row)
        tl.store(out_ptr + (lse_at * D)[:, None] + d[None, :], acc, mask=out_mask)
    else:
        out = out_ptr + (at * out_token + head_at * out_head)[:, None] + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        if LSE:
            tl.store(lse_ptr + at * HEADS + head, lse * 0.6931471805599453, mask=is_row)


@triton.jit
def _cached_tile(
    peak, total, acc, query, key_cache_ptr, value_cache_ptr, table_ptr, query_at, key_at, stop,
    scale, cap, slope, window, tree, context, span, span_ptr, span_at, kc_block, kc_slot, vc_block, vc_slot, d, is_d,
    PAGE: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr, FP8: tl.constexpr, INTERPRET: tl.constexpr, SLICE: tl.constexpr,
    TREE: tl.constexpr, SPANS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of keys read through the block table. Keys at ``stop`` and behind it are not read."""
    is_key = key_at < stop
    page = tl.load(table_ptr + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
    slot = key_at % PAGE
    if WIDE:
        slot = slot.to(tl.int64)
    keys = key_cache_ptr + (page * kc_block + slot * kc_slot)[None, :] + d[:, None]
    values = value_cache_ptr + (page * vc_block + slot * vc_slot)[:, None] + d[None, :]
    zero = 0 if FP8 != "" else 0.0
    if WHOLE:
        key = tl.load(keys, mask=is_key[None, :], other=zero)
        value = tl.load(values, mask=is_key[:, None], other=zero)
    else:
        key = tl.load(keys, mask=is_key[None, :] & is_d[:, None], other=zero)
        value = tl.load(values, mask=is_key[:, None] & is_d[None, :], other=zero)
    key_span = tl.zeros_like(key_at)
    if SPANS:
        key_span = tl.load(span_ptr + span_at + key_at, mask=is_key & (key_at >= context), other=0)
    return attend_tile(
        peak, total, acc, query, stored(key, FP8, INTERPRET, query), stored(value, FP8, INTERPRET, query),
        query_at, key_at, stop, scale, cap, slope, window, tree, context, span, key_span, CAUSAL, WINDOW, SOFT_CAP,
        ALIBI, SLICE, TREE, SPANS,
    )  # fmt: skip
