"""What the attention kernels do with one tile of keys and values."""

# Names in capitals are compile-time constants, as is the habit in Triton.
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stored(raw, FP8: tl.constexpr, UPCAST: tl.constexpr, like):
    """Numbers of the cache as operands of a product: ``raw`` as it is, or bytes of an fp8 cache as ``like``'s dtype.

    Bytes become halves by shifting, which is exact and needs no fp8 unit: e5m2 is the upper byte of a half, e4m3fn a
    half whose exponent is short by 8. The product with 256 is made in float32, since matrix units may take small halves
    for zero.
    """
    if FP8 == "e4m3":
        bits = raw.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif FP8 == "e5m2":
        values = (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = raw
    return values.to(tl.float32) if UPCAST else values.to(like.dtype)


@triton.jit
def bits_set(word):
    """How many bits of each number of 64 bits are set, as int32: pairs are added up, then fours, then bytes."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def tanh_of(doubled):
    """tanh(x) of ``doubled``, 2x times log2(e): within 2e-6 of the result, however small that is.

    1 - 2 / (exp(2x) + 1) is right at both ends, where exp is 0 or infinite. Near 0 it has the last place of 1, which is
    whole units of a score under a large cap; the first terms of the series are taken there.
    """
    x = doubled * 0.34657359027997264
    square = x * x
    near = x - x * square * (1.0 / 3.0 - square * (2.0 / 15.0))
    return tl.where(square < 0.008, near, 1.0 - 2.0 / (tl.exp2(doubled) + 1.0))


@triton.jit
def attend_tile(
    peak, total, acc, query, key, value, query_at, key_at, end, scale, cap, slope, window, tree, context,
    span, key_span,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SLICE: tl.constexpr,
    TREE: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, in powers of two, over keys (D, N) and values (N, D) at positions ``key_at``.

    ``peak`` and ``total`` (M,) and ``acc`` (M, D) are the state. ``scale`` turns products into scores times log2(e),
    or, under a soft cap, into twice the argument of tanh times log2(e).

    ``SOFT_CAP`` is 0, 1 or, where the cap is so large that the last places of small scores matter, 2.

    With ``SLICE`` the product with keys is a batch of products over ``SLICE`` numbers of a head each, which wavefronts
    share. In one product each wavefront holds whole rows, which are too many registers where heads are wide.

    With ``TREE``, ``tree`` (M,) are the rows' masks, uint64: 0, or a bit for each token of the sequence in this step,
    from key ``context`` on, that the row sees. A row with a mask is as far from a key as there are tokens on the path.

    With ``SPANS``, ``span`` (M,) says of each row which span it is in, ``key_span`` (N,) of each key; 0: in none. A row
    sees the keys of its span, whatever else hides them.
    """
    if SLICE:
        queries = query.reshape(query.shape[0], query.shape[1] // SLICE, SLICE).permute(1, 0, 2)
        keys = key.reshape(key.shape[0] // SLICE, SLICE, key.shape[1])
        score = tl.sum(tl.dot(queries, keys, input_precision="ieee"), 0) * scale
    else:
        score = tl.dot(query, key, input_precision="ieee") * scale
    if SOFT_CAP == 2:
        score = cap * tanh_of(score)
    elif SOFT_CAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp is 0 or infinite
        score = cap - 2.0 * cap / (tl.exp2(score) + 1.0)
    distance = query_at[:, None] - key_at[None, :]
    if TREE:
        drafted = key_at >= context
        above = tree[:, None] >> tl.minimum(tl.maximum(key_at - context, 0), 63).to(tl.uint64)[None, :]
        seen = (tree == 0)[:, None] | ~drafted[None, :] | ((above & 1) != 0)
        if WINDOW or ALIBI:  # the context is one path; in the tree, the bits above a key's are the tokens behind it
            depth = bits_set(tree) - 1
            by_depth = tl.where(drafted[None, :], bits_set(above) - 1, (context + depth)[:, None] - key_at[None, :])
            distance = tl.where((tree == 0)[:, None], distance, by_depth)
    if ALIBI:
        score -= slope[:, None] * (distance if CAUSAL and not SPANS else tl.abs(distance)).to(tl.float32)
    is_key = key_at[None, :] < end
    visible = is_key
    if TREE:
        visible = visible & seen & (query_at[:, None] >= key_at[None, :])
    elif CAUSAL:
        visible = visible & (distance >= 0)
    if WINDOW:
        visible = visible & (distance < window)
        if not CAUSAL:
            visible = visible & (distance > -window)
    if SPANS:
        visible = visible | (is_key & (span[:, None] == key_span[None, :]) & (key_span > 0)[None, :])
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    # A row that has seen nothing yet has no peak: -inf less -inf is no number.
    ground = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - ground[:, None])
    fade = tl.exp2(peak - ground)
    total = total * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc
