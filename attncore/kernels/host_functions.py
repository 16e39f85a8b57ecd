"""Checked functions on host arrays, for callers that keep their own state.

One for each field, ``pad_block_table``, and three by which engines of the first generation compute slots sequence by
sequence: ``is_block_tables_empty``, ``compute_slot_mapping_start_idx`` and ``compute_slot_mapping``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments, env
from attncore.arguments import INT32_MAX, flag, integer, optional_integer, why_no_list
from attncore.array_arguments import (
    MOST_BLOCKS,
    MOST_TOKENS,
    Int32Array,
    Int64Array,
    at_most,
    bad_block_ids,
    context_and_query,
    output,
)
from attncore.kernels import load_kernels
from attncore.kernels.codes import PAD_SLOT_ID
from attncore.quoted import MAX_PART, one_line, quoted
from attncore.show import counted

_ARRAY, _ID_DTYPES = np.ndarray, (np.dtype(np.int32), np.dtype(np.int64))

_ARRAY_TOKENS = 256
"""Tokens of a sequence from which NumPy is faster than a loop over the blocks of an array."""

_compiled: Callable[..., bool] | None = None
"""``append_slots`` of the compiled kernels once it was looked for; where they are not used, what does nothing."""

_REFUSED = (OverflowError, ValueError, TypeError, AttributeError, BufferError)
"""What arrays and other sequences raise for an element that they do not hold, or a method that they have not."""


def is_block_tables_empty(block_tables: Mapping[int, Sequence[int] | None] | None) -> bool:
    """Whether a group has no block tables, as in a profiling run: None, or a mapping whose every value is None."""
    if block_tables is None:
        return True
    return all(table is None for table in _mapping(block_tables).values())


def _mapping(block_tables: Any) -> Mapping[Any, Any]:
    if not isinstance(block_tables, Mapping):
        raise TypeError(f"block_tables: {type(block_tables).__name__} is no mapping of sequence to block ids")
    return block_tables


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """The index of the first token whose slot is written: earlier tokens of a prompt have left the window already.

    It is compared with a token's absolute index (context included), as in the first generation.
    """
    query_len = integer("query_len", query_len, 1)
    context_len = integer("context_len", context_len, 0)
    sliding_window = optional_integer("sliding_window", sliding_window, 1)
    is_prompt = flag("is_prompt", is_prompt)
    return max(0, query_len - sliding_window) if is_prompt and sliding_window is not None else 0


def compute_slot_mapping(
    is_profile_run: bool,
    slot_mapping: MutableSequence[int],
    seq_id: int,
    seq_len: int,
    context_len: int,
    start_idx: int,
    block_size: int,
    block_tables: Mapping[int, Sequence[int] | npt.NDArray[Any]],
) -> None:
    """Appends the slots of one sequence's tokens ``context_len..seq_len`` to ``slot_mapping``.

    Tokens before ``start_idx`` and every token of a profiling run get ``PAD_SLOT_ID``; token i of the others gets
    ``block_tables[seq_id][i // block_size] * block_size + i % block_size``. Raises ValueError, and appends nothing,
    where the table is missing or too short. Of a list of ids those alone are read that the tokens are in.
    """
    # The usual case first, for which an engine has a microsecond a sequence; what is unusual goes on to the checks.
    if (_compiled or _load_compiled())(
        is_profile_run, slot_mapping, seq_id, seq_len, context_len, start_idx, block_size, block_tables
    ):
        return
    if type(context_len) is int and type(seq_len) is int and type(block_size) is int and type(start_idx) is int:
        table: Any = block_tables.get(seq_id) if type(block_tables) is dict and type(seq_id) is int else None
        if (
            (type(table) is list or (type(table) is _ARRAY and table.dtype in _ID_DTYPES and table.ndim == 1))
            and is_profile_run is False
            and 0 <= start_idx <= INT32_MAX >= seq_len > context_len >= 0 < block_size <= INT32_MAX
        ):
            column, offset, count = context_len // block_size, context_len % block_size, seq_len - context_len
            if context_len >= start_idx and offset + count <= block_size and count <= MOST_TOKENS:  # all in one block
                ids: Any = table
                block_id = None
                if column < len(ids):
                    block_id = ids[column] if type(table) is list else ids.item(column)
                if type(block_id) is int and 0 <= block_id <= INT32_MAX:
                    first = block_id * block_size + offset
                    if count == 1 and type(slot_mapping) is list:
                        slot_mapping.append(first)
                    else:
                        _extend(slot_mapping, range(first, first + count))
                    return
            elif (found := _slots_of_row(table, context_len, seq_len, start_idx, block_size)) is not None:
                _extend(slot_mapping, found)
                return
    context_len = integer("context_len", context_len, 0)
    seq_len = integer("seq_len", seq_len, context_len + 1)
    start_idx = integer("start_idx", start_idx, 0)
    block_size = integer("block_size", block_size, 1)
    at_most("seq_len", seq_len - context_len, MOST_TOKENS, "tokens beyond context_len")
    if flag("is_profile_run", is_profile_run):
        _extend(slot_mapping, [PAD_SLOT_ID] * (seq_len - context_len))
        return
    block_tables = _mapping(block_tables)
    try:
        ids = block_tables.get(seq_id)  # asked for once: a name's hash may change
    except TypeError as error:
        raise TypeError(f"seq_id: {quoted(seq_id)} cannot name a sequence: {one_line(error, MAX_PART)}") from error
    if ids is None:
        raise ValueError(f"block_tables: no table for sequence {quoted(seq_id)}; it has {quoted(list(block_tables))}")
    rectangle = pad_block_table([ids])
    written = min(max(start_idx, context_len), seq_len)
    if seq_len > written and (seq_len - 1) // block_size >= rectangle.shape[1]:
        problem = array_arguments.too_few_blocks(rectangle.shape[1], seq_len, block_size)
        raise ValueError(f"block_tables: sequence {seq_id} {problem}")
    slots = build_slot_mapping(rectangle, [written], [seq_len - written], block_size)
    _extend(slot_mapping, [PAD_SLOT_ID] * (written - context_len) + slots.tolist())


def _load_compiled() -> Callable[..., bool]:
    """Sets ``_compiled``. numba has nothing of the kind, and is not loaded for it."""
    global _compiled
    found = None
    if env.kernels() != "numba":
        try:
            found = importlib.import_module("attncore._slots").append_slots
        except MemoryError:  # of this moment: the next call looks again
            raise
        except Exception:  # a broken extension: load_kernels says what is wrong with it
            pass
    _compiled = found or _does_nothing
    return _compiled


def _does_nothing(*_: Any) -> bool:
    return False


def _extend(slot_mapping: MutableSequence[int], slots: Sequence[int]) -> None:
    """Appends all of ``slots``, or nothing: an array of small integers appends what comes before one too large."""
    if type(slot_mapping) is list:
        slot_mapping += slots
        return
    if not (hasattr(slot_mapping, "extend") and hasattr(slot_mapping, "__len__")):
        raise TypeError(f"slot_mapping: {type(slot_mapping).__name__} found; give a list to append to")
    if getattr(slot_mapping, "typecode", "") in ("f", "d"):
        raise TypeError("slot_mapping: an array of floats found, which rounds large slots; give a list")
    before = len(slot_mapping)
    try:
        slot_mapping.extend(slots)
    except _REFUSED as error:
        if len(slot_mapping) > before:
            del slot_mapping[before:]
        least, most = min(slots), max(slots)
        wrong = least if least < 0 and most <= INT32_MAX else most
        raise ValueError(f"slot_mapping: it does not hold slot {wrong} ({error}); give a list") from error


def _slots_of_row(table: Any, context_len: int, seq_len: int, start_idx: int, block_size: int) -> list[int] | None:
    """The slots of ``compute_slot_mapping`` for a list or a plain array; None where it has to refuse."""
    start = start_idx if start_idx > context_len else context_len
    rest, offset = seq_len - start, start % block_size
    if rest < 1 or seq_len - context_len > MOST_TOKENS:
        return None
    slots: list[int] = [PAD_SLOT_ID] * (start - context_len) if start > context_len else []
    ids = table[start // block_size : (seq_len - 1) // block_size + 1]
    if type(ids) is not list:
        if rest >= _ARRAY_TOKENS and block_size <= rest:
            return _slots_of_ids(slots, ids, rest, offset, block_size)
        ids = ids.tolist()
    for block_id in ids:
        if type(block_id) is not int or not 0 <= block_id <= INT32_MAX:
            return None
        run = block_size - offset
        if run > rest:
            run = rest
        first = block_id * block_size + offset
        slots += range(first, first + run)
        rest -= run
        offset = 0
    return None if rest else slots


def _slots_of_ids(slots: list[int], ids: npt.NDArray[Any], rest: int, offset: int, block_size: int) -> list[int] | None:
    """``slots`` with those of ``rest`` tokens in the blocks ``ids``, of which the first is full up to ``offset``."""
    ids = ids.astype(np.int64)  # a copy: another thread may write to the caller's between the check and the use
    if len(ids) * block_size < rest + offset or ids.min() < 0 or ids.max() > INT32_MAX:
        return None
    whole = ids[:, np.newaxis] * block_size + np.arange(block_size)
    found: list[int] = whole.reshape(-1)[offset : offset + rest].tolist()
    return slots + found if slots else found


def build_query_start_loc(query_lens: npt.ArrayLike, out: Int32Array | None = None) -> Int32Array:
    """Prefix sums int32[n + 1] of ``query_lens`` int[n], from 0 on; of seq_lens they are seq_start_loc."""
    lengths = array_arguments.lengths("query_lens", query_lens, 0)
    out = output("out", out, len(lengths) + 1, np.int32)
    total = np.cumsum(lengths, dtype=np.int64)
    if len(total) and total[-1] > INT32_MAX:
        raise ValueError(f"query_lens: the sum {total[-1]} does not fit int32")
    out[0] = 0
    out[1:] = total
    return out


def build_slot_mapping(
    block_table: npt.ArrayLike,
    context_lens: npt.ArrayLike,
    query_lens: npt.ArrayLike,
    block_size: int,
    out: Int64Array | None = None,
) -> Int64Array:
    """Slots int64[num_tokens] of a batch: ``block_table`` int32[n, width], lengths int[n], all on the host.

    Raises ValueError, naming the row, where a token's block lies beyond the table's width. ``out`` must not
    share memory with the other arrays, which are read while it is written.
    """
    block_size = integer("block_size", block_size, 1)
    table = array_arguments.block_table(block_table)
    context, query = context_and_query(context_lens, query_lens, len(table))
    last = context.astype(np.int64) + query - 1
    short = np.flatnonzero((query > 0) & (last // block_size >= table.shape[1]))
    if len(short):
        row = int(short[0])
        problem = array_arguments.too_few_blocks(table.shape[1], int(last[row]) + 1, block_size)
        raise ValueError(f"block_table: row {row} {problem}")
    total = int(query.sum(dtype=np.int64))
    if out is None:
        at_most("query_lens", total, MOST_TOKENS, "tokens")
    out = output("out", out, total, np.int64)
    if len(out):
        _check_unchanged("query_lens", load_kernels().fill_slot_mapping(table, context, query, block_size, out))
    return out


def build_positions(context_lens: npt.ArrayLike, query_lens: npt.ArrayLike) -> tuple[Int64Array, Int32Array]:
    """``positions`` int64[num_tokens] and ``token_to_req_indices`` int32[num_tokens] of a batch of lengths int[n]."""
    context, query = context_and_query(context_lens, query_lens, None)
    total = at_most("query_lens", int(query.sum(dtype=np.int64)), MOST_TOKENS, "tokens")
    positions, rows = np.empty(total, np.int64), np.empty(total, np.int32)
    if total:
        _check_unchanged("query_lens", load_kernels().fill_positions(context, query, positions, rows))
    return positions, rows


def build_logits_indices(query_start_loc: npt.ArrayLike) -> Int32Array:
    """The index of the last token of each request, int32[n], from ``query_start_loc`` int32[n + 1]."""
    starts = array_arguments.lengths("query_start_loc", query_start_loc, 0)
    if not len(starts) or starts[0] or (np.diff(starts) < 0).any():
        raise ValueError("query_start_loc: these are no prefix sums: they start with 0 and never fall")
    return starts[1:] - np.int32(1)


def build_page_lists(
    block_table: npt.ArrayLike, seq_lens: npt.ArrayLike, block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """``paged_kv_indptr`` int32[n + 1], ``paged_kv_indices`` int32[indptr[-1]], ``paged_kv_last_page_len`` int32[n].

    From ``block_table`` int32[n, width] and ``seq_lens`` int[n]; an empty request has no pages and a last length of 0.
    Raises ValueError, naming the row, where a table is too short.
    """
    block_size = integer("block_size", block_size, 1)
    table = array_arguments.block_table(block_table)
    lengths = array_arguments.lengths("seq_lens", seq_lens, 0)
    if len(lengths) != len(table):
        raise ValueError(
            f"seq_lens: {counted(len(lengths), 'length')} for the {counted(len(table), 'row')} of block_table"
        )
    pages = (lengths.astype(np.int64) + block_size - 1) // block_size
    short = np.flatnonzero(pages > table.shape[1])
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"block_table: row {row} has {counted(table.shape[1], 'column')} but needs {counted(pages[row], 'page')}"
        )
    indptr = build_query_start_loc(pages)
    indices = np.empty(int(indptr[-1]), np.int32)
    if len(indices):
        _check_unchanged("seq_lens", load_kernels().fill_page_indices(table, indptr, indices))
    last_page_len = np.where(lengths > 0, (lengths - 1) % block_size + 1, 0).astype(np.int32)
    return indptr, indices, last_page_len


def _check_unchanged(name: str, row: int) -> None:
    """ValueError where the kernels refused a ``row`` that the checks had accepted."""
    if row >= 0:
        raise ValueError(f"{name}: row {row} changed while it was read; call again when no other thread writes to it")


def pad_block_table(
    rows: Sequence[Sequence[int] | npt.NDArray[Any]], width: int | None = None, out: Int32Array | None = None
) -> Int32Array:
    """Pads rows of block ids with 0 to a rectangle int32[n, width]; width defaults to the longest row.

    Raises ValueError, naming the row, for an id that is no int32 >= 0 and for a row longer than the width.
    """
    rows = arguments.items("rows", rows)  # one reading: a sequence's length and its items need not agree
    for index, row in enumerate(rows):
        if why_no_list(row) is None and not hasattr(row, "__len__"):
            raise TypeError(f"rows: row {index}: {quoted(row)} is not a sequence of block ids")
        if type(row) is np.ndarray and row.ndim != 1:
            raise TypeError(f"rows: row {index}: {row.dtype}{list(row.shape)}; it must be a list of block ids")
        if type(row) is not np.ndarray:
            rows[index] = arguments.items(f"rows: row {index}", row)
    columns = max((len(row) for row in rows), default=0) if width is None else integer("width", width, 0)
    at_most("width", len(rows) * columns, MOST_BLOCKS, "block ids in all rows")
    table = np.empty((len(rows), columns), np.int32)
    bad = load_kernels().fill_block_table(rows, table) if rows else -1
    if bad >= 0:
        error, text = bad_block_ids(rows[bad], INT32_MAX + 1) or (
            ValueError,
            f"{counted(len(rows[bad]), 'block id')} but room for {columns}",
        )
        raise error(f"rows: row {bad}: {text}")
    if out is None:
        return table
    # Filled separately first, so that a refused row leaves the caller's array unchanged.
    np.copyto(output("out", out, table.shape, np.int32), table)
    return out
