"""Classifies requests as decodes, short extends or prefills, and finds the fewest swaps for that order of rows.

Host arithmetic on NumPy arrays, without state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array
from attncore.kernels import load_kernels
from attncore.show import counted

DECODE, EXTEND, PREFILL = range(3)
"""Kinds of requests, in the order of rows."""

_NONE = np.empty(0, np.int32)
_MOST_ROWS = 1 << 20  # of a list that a number asks for: 2**31 rows take minutes and all memory


class DecodePrefillSplit(NamedTuple):
    """Requests and tokens of a batch in two parts: first decodes, then prefills."""

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

    Speculative queries up to the threshold count as decodes. ``require_uniform``, for a kernel that takes a single
    query length: only the leading rows with the first row's length are decodes; the rows after them are prefills.
    Rows without tokens (padding) count with the part that they follow. Raises ValueError where a decode follows a
    prefill: put the batch in order first.
    """
    decode_threshold = arguments.integer("decode_threshold", decode_threshold, 1)
    lens = array_arguments.lengths("query_lens", query_lens, 0)
    require_uniform = arguments.flag("require_uniform", require_uniform)
    long = lens > decode_threshold
    num_decodes = _count_leading(long)
    if num_decodes < len(lens):
        _check_order(lens, num_decodes, decode_threshold)
    if require_uniform and num_decodes:
        num_decodes = _count_leading((lens[:num_decodes] != lens[0]) & (lens[:num_decodes] > 0))
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

    The kinds are those of ``classify_requests``. Raises ValueError where a row follows one of a later part.
    """
    lens = array_arguments.lengths("query_lens", query_lens, 1)
    kinds, split = _classify(lens, context_lens, decode_threshold, extend_threshold)
    wrong = np.flatnonzero(kinds[1:] < kinds[:-1])
    if len(wrong):
        row, names = int(wrong[0]) + 1, ("decode", "short extend", "prefill")
        raise ValueError(
            f"query_lens: row {row}, a {names[kinds[row]]}, stands behind a {names[kinds[row - 1]]}; "
            "put the batch in order first (plan_reorder)"
        )
    return split


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
    lens = array_arguments.lengths("query_lens", query_lens, 1)
    return _classify(lens, context_lens, decode_threshold, extend_threshold)[0]


def plan_reorder(kinds: npt.ArrayLike) -> Int32Array:
    """The fewest swaps of rows that put ``kinds`` int[n] (0, 1, 2) in ascending order: int32[k, 2], applied in turn.

    Each swap exchanges two whole rows. Rows of one kind keep no particular order among themselves. ``rows_after`` turns
    the swaps into a permutation.
    """
    array = array_arguments.as_array("kinds", kinds)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"kinds: {array.dtype}{list(array.shape)}; it must be a list of 0, 1 and 2")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= PREFILL:
        wrong = int(np.flatnonzero((array < 0) | (array > PREFILL))[0])
        raise ValueError(f"kinds: {array[wrong]} at index {wrong} is outside 0..{PREFILL}")
    return _find_swaps(array.astype(np.int8))


def reorder_batch(
    query_lens: npt.ArrayLike,
    context_lens: npt.ArrayLike | None = None,
    decode_threshold: int = 1,
    extend_threshold: int | None = None,
) -> tuple[Int32Array, ThreeWaySplit]:
    """``plan_reorder`` of a batch in any order, and the split that it has afterwards, in one pass over the lengths.

    Arguments are those of ``classify_requests``; without ``context_lens`` there are no extends.
    """
    lens = array_arguments.lengths("query_lens", query_lens, 1)
    kinds, split = _classify(lens, context_lens, decode_threshold, extend_threshold)
    return _find_swaps(kinds), split


def rows_after(swaps: npt.ArrayLike, num_rows: int) -> Int32Array:
    """The old row of each row after ``swaps`` int[k, 2]: int32[num_rows], so that ``new = old[rows]``.

    For an engine's own tensors of one row per request. ``metadata.moves`` are swaps too.
    """
    num_rows = arguments.integer("num_rows", num_rows, 0, _MOST_ROWS)
    pairs = array_arguments.as_array("swaps", swaps)
    if pairs.size and (pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu"):
        raise ValueError(f"swaps: {pairs.dtype}{list(pairs.shape)}; give pairs of rows (k, 2)")
    if pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < num_rows:
        raise ValueError(f"swaps: a row outside 0..{num_rows - 1} ({int(pairs.min())} to {int(pairs.max())} found)")
    rows = list(range(num_rows))
    for i, j in pairs.reshape(-1, 2).tolist():
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows, np.int32)


def _classify(
    lens: Int32Array, context_lens: npt.ArrayLike | None, decode_threshold: int, extend_threshold: int | None
) -> tuple[npt.NDArray[np.int8], ThreeWaySplit]:
    """The kind of each row, and the numbers of rows and tokens by kind, for any order of rows."""
    decode_threshold = arguments.integer("decode_threshold", decode_threshold, 1)
    if extend_threshold is None:
        extend_threshold = INT32_MAX
    elif context_lens is None:
        raise ValueError("extend_threshold: given without context_lens, which say who extends; give both")
    else:
        extend_threshold = arguments.integer("extend_threshold", extend_threshold, decode_threshold)
    contexts = _NONE
    if context_lens is not None:
        contexts = array_arguments.lengths("context_lens", context_lens, 0)
        if len(contexts) != len(lens):
            raise ValueError(
                f"context_lens: {counted(len(contexts), 'length')} for {len(lens)} query_lens; give one each"
            )
    kinds, counts = np.empty(len(lens), np.int8), np.empty(6, np.int64)
    load_kernels().classify(lens, contexts, decode_threshold, extend_threshold, kinds, counts)
    rows, tokens = counts.tolist()[:3], counts.tolist()[3:]
    return kinds, ThreeWaySplit(rows[0], tokens[0], rows[1], tokens[1], rows[2], tokens[2])


def _find_swaps(kinds: npt.NDArray[np.int8]) -> Int32Array:
    """The fewest swaps that sort rows of these kinds; ``kinds`` is sorted afterwards."""
    swaps = np.empty((len(kinds), 2), np.int32)
    return swaps[: load_kernels().order_kinds(kinds, swaps)]


def _count_leading(flags: npt.NDArray[np.bool_]) -> int:
    """The number of rows before the first flagged one."""
    first = int(flags.argmax()) if len(flags) else 0
    return first if len(flags) and flags[first] else len(flags)


def _check_order(lens: Int32Array, num_decodes: int, threshold: int) -> None:
    behind = lens[num_decodes:]
    wrong = (behind <= threshold) & (behind > 0)
    if wrong.any():
        row = num_decodes + int(wrong.argmax())
        raise ValueError(
            f"query_lens: row {row}, a decode of {counted(lens[row], 'token')}, stands behind row {num_decodes}, a "
            f"prefill of {lens[num_decodes]} (decode_threshold {threshold}); put the batch in order first "
            "(plan_reorder)"
        )
