"""The kernels of the hot path, whichever implementation runs here, and their checked public functions.

Two implementations have the same classes and functions: ``attncore._slots`` (Cython, what a wheel carries) and
``attncore._slots_numba`` (numba, for a platform without a compiler). :func:`load_kernels` picks one and
:func:`why_kernels` says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attncore import env

KernelsName = Literal["cython", "numba"]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PAD_SLOT_ID = -1
"""The slot of a token that is not written to the cache."""

INT32_MAX = 2**31 - 1

# What a kernel's check may answer (the enum of _slots.pyx).
OK, TOO_FEW_BLOCKS, NULL_BLOCK, TOO_LONG, TOO_MANY_TOKENS, TOO_MANY_SEQ_TOKENS = range(6)
HIT_ON_DECODE, HIT_WITH_WINDOW, CONTEXT_WITHOUT_CHUNKS, QUERY_TOO_LONG = range(6, 10)
TOO_MANY_ENCODER_TOKENS, QUERY_NOT_CAPTURED, ENCODER_NOT_CAPTURED, TOO_MANY_ROWS = range(10, 14)

_MODULES: dict[KernelsName, str] = {"cython": "attncore._slots", "numba": "attncore._slots_numba"}


def load_kernels(name: KernelsName | None = None) -> Any:
    """The module of kernels: the one named, else the one of ``ATTNCORE_KERNELS``, else Cython, else numba.

    Raises ValueError for another name, ImportError where the one asked for cannot be imported or neither can.
    """
    wanted = name or env.kernels()
    if wanted is not None:
        if wanted not in _MODULES:
            raise ValueError(f"kernels: {wanted!r} is not one of {', '.join(_MODULES)}")
        try:
            return importlib.import_module(_MODULES[wanted])
        except ImportError as error:
            raise ImportError(f"kernels: {wanted} was asked for and cannot be imported: {error}") from error
    failures = []
    for candidate, module in _MODULES.items():
        try:
            return importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{candidate}: {error}")
    raise ImportError(
        f"kernels: none can be imported ({'; '.join(failures)}); reinstall attncore with a C compiler, "
        "or pip install attncore[numba]"
    )


def why_kernels(name: KernelsName | None = None) -> str:
    """One sentence: which implementation runs here and why."""
    kernels = load_kernels(name)
    if name:
        return f"{kernels.IMPLEMENTATION}: asked for by the caller"
    if env.kernels():
        return f"{kernels.IMPLEMENTATION}: asked for by ATTNCORE_KERNELS"
    if kernels.IMPLEMENTATION == "cython":
        return f"cython: the compiled extension is installed (reads Python ints by {kernels.READS_INTS})"
    return "numba: the compiled extension is not installed"


def is_block_tables_empty(block_tables: Mapping[int, Sequence[int] | None] | None) -> bool:
    """Whether a group has no block tables, as in a profiling run: None, or a mapping whose every value is None."""
    return block_tables is None or all(table is None for table in block_tables.values())


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """The first token index whose slot is written: earlier prompt tokens have left the window already.

    Compared with the token's absolute index (context included), as the first generation did.
    """
    _integer("query_len", query_len, 1)
    _integer("context_len", context_len, 0)
    if sliding_window is None:
        return 0
    _integer("sliding_window", sliding_window, 1)
    return max(0, query_len - sliding_window) if is_prompt else 0


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

    Tokens before ``start_idx`` and every token of a profiling run get ``PAD_SLOT_ID``; the others
    ``block_tables[seq_id][i // block_size] * block_size + i % block_size``. Raises ValueError, and appends nothing,
    where the table is too short.
    """
    _integer("context_len", context_len, 0)
    _integer("seq_len", seq_len, context_len + 1)
    _integer("start_idx", start_idx, 0)
    _integer("block_size", block_size, 1)
    if is_profile_run:
        slot_mapping.extend([PAD_SLOT_ID] * (seq_len - context_len))
        return
    if block_tables.get(seq_id) is None:
        raise ValueError(f"block_tables: no table for sequence {seq_id}; it has {sorted(block_tables)}")
    table = pad_block_table([block_tables[seq_id]])
    written = min(max(start_idx, context_len), seq_len)
    if seq_len > written and (seq_len - 1) // block_size >= table.shape[1]:
        token = max(written, table.shape[1] * block_size)
        raise ValueError(
            f"block_tables: sequence {seq_id} holds {table.shape[1]} blocks but token {token} "
            f"needs block {token // block_size} (block_size {block_size})"
        )
    slots = build_slot_mapping(table, [written], [seq_len - written], block_size)
    slot_mapping.extend([PAD_SLOT_ID] * (written - context_len) + slots.tolist())


def build_query_start_loc(query_lens: npt.ArrayLike, out: Int32Array | None = None) -> Int32Array:
    """Exclusive prefix sums, int32[n + 1], of lengths int[n] (also seq_start_loc, of seq_lens)."""
    lengths = _lengths("query_lens", query_lens, 0)
    out = _output("out", out, len(lengths) + 1, np.int32)
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
    """Slots, int64[num_tokens], of a batch: ``block_table`` int32[n, width], lengths int[n], all on the host.

    Raises ValueError, naming the row, where a token's block lies beyond the table's width.
    """
    _integer("block_size", block_size, 1)
    table = _block_table(block_table)
    context, query = _context_and_query(context_lens, query_lens, len(table))
    last = context.astype(np.int64) + query - 1
    short = np.flatnonzero((query > 0) & (last // block_size >= table.shape[1]))
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"block_table: row {row} holds {table.shape[1]} blocks but token {last[row]} "
            f"needs block {last[row] // block_size} (block_size {block_size})"
        )
    out = _output("out", out, int(query.sum(dtype=np.int64)), np.int64)
    if len(out):
        load_kernels().fill_slot_mapping(table, context, query, block_size, out)
    return out


def build_positions(context_lens: npt.ArrayLike, query_lens: npt.ArrayLike) -> tuple[Int64Array, Int32Array]:
    """``positions`` int64[num_tokens] and ``token_to_req_indices`` int32[num_tokens] of a batch of lengths int[n]."""
    context, query = _context_and_query(context_lens, query_lens, None)
    total = int(query.sum(dtype=np.int64))
    positions, rows = np.empty(total, np.int64), np.empty(total, np.int32)
    if total:
        load_kernels().fill_positions(context, query, positions, rows)
    return positions, rows


def build_logits_indices(query_start_loc: npt.ArrayLike) -> Int32Array:
    """Index of the last token of each request, int32[n], from ``query_start_loc`` int32[n + 1]."""
    starts = _lengths("query_start_loc", query_start_loc, 0)
    if not len(starts) or starts[0] or (np.diff(starts) < 0).any():
        raise ValueError("query_start_loc: these are no prefix sums: they start with 0 and never fall")
    return starts[1:] - np.int32(1)


def build_page_lists(
    block_table: npt.ArrayLike, seq_lens: npt.ArrayLike, block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """``paged_kv_indptr`` int32[n + 1], ``paged_kv_indices`` int32[indptr[-1]], ``paged_kv_last_page_len`` int32[n].

    From the rectangle int32[n, width] and lengths int[n]; an empty request has no pages and a last length of 0.
    """
    _integer("block_size", block_size, 1)
    table = _block_table(block_table)
    lengths = _lengths("seq_lens", seq_lens, 0)
    if len(lengths) != len(table):
        raise ValueError(f"seq_lens: {len(lengths)} lengths for the {len(table)} rows of block_table")
    pages = (lengths.astype(np.int64) + block_size - 1) // block_size
    short = np.flatnonzero(pages > table.shape[1])
    if len(short):
        row = int(short[0])
        raise ValueError(f"block_table: row {row} has {table.shape[1]} columns but {pages[row]} pages are needed")
    indptr = build_query_start_loc(pages)
    indices = np.empty(int(indptr[-1]), np.int32)
    if len(indices):
        load_kernels().fill_page_indices(table, indptr, indices)
    last_page_len = np.where(lengths > 0, (lengths - 1) % block_size + 1, 0).astype(np.int32)
    return indptr, indices, last_page_len


def pad_block_table(
    rows: Sequence[Sequence[int] | npt.NDArray[Any]], width: int | None = None, out: Int32Array | None = None
) -> Int32Array:
    """Pads rows of block ids with 0 to a rectangle int32[n, width]; width defaults to the longest row.

    Raises ValueError, naming the row, for an id that is no int32 >= 0 and for a row longer than the width.
    """
    for index, row in enumerate(rows):
        if not hasattr(row, "__len__"):
            raise TypeError(f"rows: row {index}: {row!r} is not a sequence of block ids")
    columns = max((len(row) for row in rows), default=0) if width is None else _integer("width", width, 0)
    table = np.empty((len(rows), columns), np.int32)
    bad = load_kernels().fill_block_table(list(rows), table) if len(rows) else -1
    if bad >= 0:
        kind, text = _bad_ids(rows[bad], INT32_MAX + 1) or (
            ValueError,
            f"{len(rows[bad])} block ids but room for {columns}",
        )
        raise kind(f"rows: row {bad}: {text}")
    if out is None:
        return table
    # Filled apart first: a refused row must leave the caller's array as it was.
    np.copyto(_output("out", out, table.shape, np.int32), table)
    return out


def _bad_ids(ids: Any, limit: int) -> tuple[type[ValueError] | type[TypeError], str] | None:
    """What is wrong with block ids that the kernels refused (the slow way); None where nothing is, except for room."""
    if not hasattr(ids, "__len__"):
        return TypeError, f"{ids!r} is not a sequence of block ids"
    try:
        items = list(ids)
    except (TypeError, MemoryError, OverflowError):
        return TypeError, f"{type(ids).__name__} is not a sequence of block ids that can be read"
    for index, item in enumerate(items):
        value = _int_or_none(item)
        if value is None:
            shown = item.item() if isinstance(item, np.generic) else item
            return TypeError, f"block id {shown!r} at index {index} is not an integer"
        if not 0 <= value < limit:
            return ValueError, f"block id {value} at index {index} is outside 0..{limit - 1}"
    return None


def _int_or_none(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return int(value.__index__())
    except Exception:  # the caller's own code; whatever it raises, this is no int
        return None


def _integer(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """Checks an argument: ``value`` as int, where it is one between the two."""
    number = _int_or_none(value)
    if number is None:
        raise TypeError(f"{name}: {value!r} is not an integer")
    if number < least:
        raise ValueError(f"{name}: {number} is below {least}")
    if number > most:
        raise ValueError(f"{name}: {number} " + ("does not fit int32" if most == INT32_MAX else f"exceeds {most}"))
    return number


def _block_table(values: npt.ArrayLike) -> Int32Array:
    """``block_table`` as int32[n, width]: integers >= 0 that fit."""
    array = np.asarray(values)
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"block_table: {array.dtype}{list(array.shape)}; it must be a rectangle (n, width) of integers"
        )
    if array.size and array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > INT32_MAX:
            raise ValueError(f"block_table: block id {low if low < 0 else high} is outside 0..{INT32_MAX}")
    if array.size and int(array.min()) < 0:
        raise ValueError(f"block_table: block id {int(array.min())} is outside 0..{INT32_MAX}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _lengths(name: str, values: npt.ArrayLike, least: int) -> Int32Array:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)}; it must be a list of integers")
    wrong = np.flatnonzero((array < least) | (array > INT32_MAX))
    if len(wrong):
        raise ValueError(f"{name}: {array[wrong[0]]} at index {wrong[0]} is outside {least}..{INT32_MAX}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _context_and_query(
    context_lens: npt.ArrayLike, query_lens: npt.ArrayLike, rows: int | None
) -> tuple[Int32Array, Int32Array]:
    context, query = _lengths("context_lens", context_lens, 0), _lengths("query_lens", query_lens, 0)
    if len(context) != len(query) or (rows is not None and rows != len(query)):
        raise ValueError(
            f"query_lens: {len(query)} lengths for {len(context)} context_lens"
            + (f" and {rows} rows of block_table" if rows is not None else "")
        )
    wrong = np.flatnonzero(context.astype(np.int64) + query > INT32_MAX)
    if len(wrong):
        raise ValueError(
            f"context_lens: row {wrong[0]} ends at token {int(context[wrong[0]]) + int(query[wrong[0]])}, "
            f"beyond {INT32_MAX}"
        )
    return context, query


def _output(name: str, out: Any, shape: int | tuple[int, ...], dtype: type[np.generic]) -> Any:
    shape = shape if isinstance(shape, tuple) else (shape,)
    if out is None:
        return np.empty(shape, dtype)
    wanted = f"it must be {np.dtype(dtype)}{list(shape)}, contiguous and writable"
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name}: {type(out).__name__} is no array; {wanted}")
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        raise ValueError(f"{name}: {out.dtype}{list(out.shape)}; {wanted}")
    return out
