"""Which requests of a step are decodes, short extends or prefills, and the fewest swaps that put them in that order.

Host arithmetic on NumPy arrays; nothing here keeps state.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import slots
from attncore.builder import checks

DECODE, EXTEND, PREFILL = range(3)
"""Kinds of requests, in the order of rows."""

_Rows = list[npt.NDArray[np.intp]]


class DecodePrefillSplit(NamedTuple):
    """Requests and tokens of a batch in two parts; the decodes are its first rows."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int


class ThreeWaySplit(NamedTuple):
    """Requests and tokens of a batch in three parts: first decodes, then short extends, then prefills."""

    num_decodes: int
    num_decode_tokens: int
    num_extends: int
    num_extend_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_lens: npt.ArrayLike, decode_threshold: int = 1, *, require_uniform: bool = False
) -> DecodePrefillSplit:
    """Splits a batch of ``query_lens`` int[n] that is in order: requests of up to ``decode_threshold`` tokens, then
    longer ones.

    Speculative queries count as decodes where the threshold lets them. ``require_uniform``: a kernel that takes one
    query length only gets the leading rows that have the first row's length; the rows behind them count as prefills.
    Rows of no tokens (padding) count with the part that they follow. Raises ValueError where a decode stands behind a
    prefill: put the batch in order first.
    """
    slots._integer("decode_threshold", decode_threshold, 1)
    lens = checks.lengths("query_lens", query_lens, 0)
    long = lens > decode_threshold
    num_decodes = _leading(long)
    if num_decodes < len(lens):
        _check_order(lens, num_decodes, decode_threshold)
    if require_uniform and num_decodes:
        num_decodes = _leading((lens[:num_decodes] != lens[0]) & (lens[:num_decodes] > 0))
    num_decode_tokens = int(lens[:num_decodes].sum(dtype=np.int64))
    num_prefill_tokens = int(lens[num_decodes:].sum(dtype=np.int64))
    return DecodePrefillSplit(num_decodes, num_decode_tokens, len(lens) - num_decodes, num_prefill_tokens)


def split_three_ways(
    query_lens: npt.ArrayLike,
    context_lens: npt.ArrayLike,
    decode_threshold: int = 1,
    extend_threshold: int | None = None,
) -> ThreeWaySplit:
    """Splits a batch of lengths int[n] that is in order: decodes, short extends, prefills.

    The kinds are those of ``classify_requests``. Raises ValueError where a row stands behind one of a later part.
    """
    lens = checks.lengths("query_lens", query_lens, 1)
    kinds = _kinds(lens, context_lens, decode_threshold, extend_threshold)
    wrong = np.flatnonzero(kinds[1:] < kinds[:-1])
    if len(wrong):
        row, names = int(wrong[0]) + 1, ("decode", "short extend", "prefill")
        raise ValueError(
            f"query_lens: row {row}, a {names[kinds[row]]}, stands behind a {names[kinds[row - 1]]}; "
            "put the batch in order first (plan_reorder)"
        )
    return _split_of(kinds, lens)


def classify_requests(
    query_lens: npt.ArrayLike,
    context_lens: npt.ArrayLike | None = None,
    decode_threshold: int = 1,
    extend_threshold: int | None = None,
) -> npt.NDArray[np.int8]:
    """The kind of each request, int8[n]: ``DECODE``, ``EXTEND`` or ``PREFILL``.

    A request of up to ``decode_threshold`` tokens in this step is a decode. With ``context_lens`` int[n], a longer one
    that has context and up to ``extend_threshold`` tokens (None: any number) is a short extend; without, there are no
    extends. The rest are prefills. Every request runs at least one token: one that runs none has no row.
    """
    return _kinds(checks.lengths("query_lens", query_lens, 1), context_lens, decode_threshold, extend_threshold)


def plan_reorder(kinds: npt.ArrayLike) -> slots.Int32Array:
    """The fewest swaps of rows that put ``kinds`` int[n] (0, 1, 2) in ascending order: int32[k, 2], applied in turn.

    Each swap exchanges two whole rows. Rows of one kind keep no particular order among themselves. ``rows_after`` turns
    the swaps into a permutation.
    """
    found = np.asarray(kinds)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"kinds: {found.dtype}{list(found.shape)}; it must be a list of 0, 1 and 2")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) <= PREFILL:
        wrong = int(np.flatnonzero((found < 0) | (found > PREFILL))[0])
        raise ValueError(f"kinds: {found[wrong]} at index {wrong} is outside 0..{PREFILL}")
    row_kinds = found.astype(np.int8)
    data = row_kinds.tobytes()
    return _fewest_swaps(row_kinds, data.count(DECODE), data.count(EXTEND))


def reorder_batch(
    query_lens: npt.ArrayLike,
    context_lens: npt.ArrayLike | None = None,
    decode_threshold: int = 1,
    extend_threshold: int | None = None,
) -> tuple[slots.Int32Array, ThreeWaySplit]:
    """``plan_reorder`` of a batch in any order, and the split that it has afterwards, in one pass over the lengths.

    Arguments are those of ``classify_requests``; without ``context_lens`` there are no extends.
    """
    lens = checks.lengths("query_lens", query_lens, 1)
    kinds = _kinds(lens, context_lens, decode_threshold, extend_threshold)
    split = _split_of(kinds, lens)
    return _fewest_swaps(kinds, split.num_decodes, split.num_extends), split


def rows_after(swaps: npt.ArrayLike, num_rows: int) -> slots.Int32Array:
    """Which old row stands in each row after ``swaps`` int[k, 2]: int32[num_rows]; ``new = old[rows]`` follows them.

    For an engine's own tensors of one row a request. ``metadata.moves`` are swaps too.
    """
    slots._integer("num_rows", num_rows, 0)
    pairs = np.asarray(swaps)
    if pairs.size and (pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu"):
        raise ValueError(f"swaps: {pairs.dtype}{list(pairs.shape)}; give pairs of rows (k, 2)")
    if pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < num_rows:
        raise ValueError(f"swaps: a row outside 0..{num_rows - 1} ({int(pairs.min())} to {int(pairs.max())} found)")
    rows = list(range(num_rows))
    for i, j in pairs.reshape(-1, 2).tolist():
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows, np.int32)


def _kinds(
    lens: slots.Int32Array, context_lens: npt.ArrayLike | None, decode_threshold: int, extend_threshold: int | None
) -> npt.NDArray[np.int8]:
    slots._integer("decode_threshold", decode_threshold, 1)
    long = lens > decode_threshold
    kinds: npt.NDArray[np.int8]
    if context_lens is None:
        if extend_threshold is not None:
            raise ValueError("extend_threshold: given without context_lens, which say who extends; give both")
        kinds = long.view(np.int8) * np.int8(PREFILL)
    else:
        is_prefill = _is_prefill(lens, context_lens, decode_threshold, extend_threshold)
        kinds = long.view(np.int8) + (long & is_prefill).view(np.int8)
    return kinds


def _is_prefill(
    lens: slots.Int32Array, context_lens: npt.ArrayLike, decode_threshold: int, extend_threshold: int | None
) -> npt.NDArray[np.bool_]:
    """Of requests that are no decodes: whether one has no context, or too many tokens for a short extend."""
    contexts = checks.lengths("context_lens", context_lens, 0)
    if len(contexts) != len(lens):
        raise ValueError(f"context_lens: {len(contexts)} lengths for {len(lens)} query_lens; give one each")
    is_prefill: npt.NDArray[np.bool_] = np.logical_not(contexts)
    if extend_threshold is not None:
        slots._integer("extend_threshold", extend_threshold, decode_threshold)
        is_prefill |= lens > extend_threshold
    return is_prefill


def _fewest_swaps(kinds: npt.NDArray[np.int8], num_decodes: int, num_extends: int) -> slots.Int32Array:
    if num_extends:
        here, there = _swaps_of_three(kinds, num_decodes, num_extends)
    else:
        front = kinds[:num_decodes].nonzero()[0]
        back = (kinds[num_decodes:] == DECODE).nonzero()[0]
        here, there = [front], [back + num_decodes]
    return np.concatenate(here + there).reshape(2, -1).T.astype(np.int32, order="C")


def _swaps_of_three(kinds: npt.NDArray[np.int8], num_decodes: int, num_extends: int) -> tuple[_Rows, _Rows]:
    """Rows to swap, and the rows to swap them with. A row's key is 3 * (the kind that belongs there) + (its kind)."""
    zones = b"\0" * num_decodes + b"\3" * num_extends + b"\6" * (len(kinds) - num_decodes - num_extends)
    keys = np.frombuffer(zones, np.int8) + kinds
    order, data = keys.argsort(kind="stable"), keys.tobytes()
    counts = [data.count(key) for key in range(9)]
    starts = list(accumulate(counts, initial=0))

    here, there = [], []
    for key, opposite in ((1, 3), (2, 6), (5, 7)):  # one swap puts two rows right
        count = min(counts[key], counts[opposite])
        i, j = starts[key], starts[opposite]
        here.append(order[i : i + count])
        there.append(order[j : j + count])
        starts[key], counts[key] = i + count, counts[key] - count
        starts[opposite] = j + count
    for first, second, third in ((1, 5, 6), (2, 7, 3)):  # the rest are rings of three: two swaps put three rows right
        count = counts[first]
        if count:
            i, j, k = starts[first], starts[second], starts[third]
            here += (order[i : i + count], order[i : i + count])
            there += (order[j : j + count], order[k : k + count])
    return here, there


def _split_of(kinds: npt.NDArray[np.int8], lens: slots.Int32Array) -> ThreeWaySplit:
    """Counts by kind, whatever the order of rows. Sums in float64 are exact: a step has fewer than 2**53 tokens."""
    data = kinds.tobytes()
    num_decodes, num_extends = data.count(DECODE), data.count(EXTEND)
    num_prefills = len(data) - num_decodes - num_extends
    decode_tokens, extend_tokens, prefill_tokens = map(int, np.bincount(kinds, lens, 3).tolist())
    return ThreeWaySplit(num_decodes, decode_tokens, num_extends, extend_tokens, num_prefills, prefill_tokens)


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many rows stand before the first that is flagged."""
    first = int(flags.argmax()) if len(flags) else 0
    return first if len(flags) and flags[first] else len(flags)


def _check_order(lens: slots.Int32Array, num_decodes: int, threshold: int) -> None:
    behind = lens[num_decodes:]
    wrong = (behind <= threshold) & (behind > 0)
    if wrong.any():
        row = num_decodes + int(wrong.argmax())
        raise ValueError(
            f"query_lens: row {row}, a decode of {lens[row]} tokens, stands behind row {num_decodes}, a prefill of "
            f"{lens[num_decodes]} (decode_threshold {threshold}); put the batch in order first (plan_reorder)"
        )
