"""What advance_step changes: the next step of a step of decodes, computed and checked before anything is written."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import array_arguments
from attncore.arguments import INT32_MAX, own_items
from attncore.array_arguments import Int32Array
from attncore.builder.lists import error_texts
from attncore.builder.slices import own_arrays, replaced
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings
    from attncore.builder.metadata import CommonAttentionMetadata

_NO_ROWS = np.empty(0, np.intp)


class Rows(NamedTuple):
    """Rows of the step, ascending, and for each a block id or a row of block ids."""

    rows: npt.NDArray[np.intp]
    ids: Int32Array


class _Items:
    """A table that can be read and has no items by index, or no slices: read as a list each time, for it may grow."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __getitem__(self, index: Any) -> Any:
        return list(self._table)[index]


class Next(NamedTuple):
    """The changes of the next step beyond adding 1 to lengths, positions and slots."""

    started: Rows
    """Rows whose token starts a block, and the id of the block."""
    table: Rows
    """Rows of ``block_table`` that change, with all their columns; their number may differ from the present width."""
    seq_lens: Int32Array | None
    """The lengths of decodes with a window; None: each grows by 1."""
    max_seq_len: int
    table_lens: list[int]
    """The lengths of the groups' tables; [] with a window, which leaves no lookahead blocks in a table."""


def plan_next(metadata: CommonAttentionMetadata, settings: ListSettings, n: int) -> Next:
    """Computes and checks the next step; writes nothing."""
    host, block_size, window = own_arrays(metadata.host), settings.block_size, settings.sliding_window
    tables = vars(metadata).get("_row_tables")
    if tables is None:
        tables = vars(metadata)["_row_tables"] = _read_row_tables(metadata, n)
    contexts = host.context_lens + np.int32(1)  # the positions of the new tokens
    _check_written(host, settings, contexts)
    longest = int(contexts.max()) + 1
    if longest > INT32_MAX:
        raise ValueError(f"metadata: row {int(contexts.argmax())} cannot grow beyond {counted(INT32_MAX, 'token')}")
    lengths = None
    total = int(host.seq_start_loc[-1]) + n
    if window is not None:
        lengths = contexts + np.int32(1)
        most = -(-window // block_size) * block_size
        lengths = np.minimum(lengths, most + lengths.astype(np.int64) % block_size).astype(np.int32)
        longest, total = int(lengths.max()), int(lengths.sum(dtype=np.int64)) + metadata.num_reqs - n
    if metadata.use_cuda_graph and longest > (settings.max_seq_len_to_capture or 0):
        row = int((contexts if lengths is None else lengths).argmax())
        raise ValueError(
            f"max_seq_len_to_capture: {settings.max_seq_len_to_capture} is below the length {longest} of row {row}; "
            "build the step anew, without a graph"
        )
    started = _find_started_blocks(host, settings, contexts, tables)
    if settings.dialect.page_lists:
        total = max(total, int(host.paged_kv_indptr[-1]) + len(started.rows))
    if total > INT32_MAX:
        raise ValueError(f"metadata: lengths or pages of this step, {total} in all, do not fit int32")
    if lengths is None:
        table_lens = list(map(len, tables))
        return Next(started, _read_grown_rows(metadata, settings, tables, table_lens), None, longest, table_lens)
    return Next(started, _trim_rows(metadata, block_size, contexts, lengths, started), lengths, longest, [])


def check_built(metadata: CommonAttentionMetadata) -> None:
    """ValueError where the step's arrays are not those that were built: it would advance from others."""
    built = metadata.source is None or metadata.source.host is metadata.host
    name = vars(metadata).get("_replaced") or (replaced(metadata.host) if built else "host")
    if name is not None:
        raise _changed(name)


def _changed(name: str) -> ValueError:
    return ValueError(f"metadata: its {name} was changed since the build; metadata is read-only, build the step anew")


def _check_written(host: Any, settings: ListSettings, contexts: Int32Array) -> None:
    """ValueError where lengths or page lists are no longer a step's: tensors on a CPU share them, and can be written.

    What else is wrong in them is wrong in the next step too, but no memory is found by it.
    """
    wrong = "context_lens" if contexts.min() < 1 else None
    room = host.block_table.shape[1] * settings.block_size
    if settings.sliding_window is not None and int(host.seq_lens.max()) > room:
        wrong = "seq_lens"
    if settings.dialect.page_lists:
        indptr = host.paged_kv_indptr
        if indptr[0] or (indptr[1:] < indptr[:-1]).any() or indptr[-1] != len(host.paged_kv_indices):
            wrong = "paged_kv_indptr"
    if wrong is not None:
        raise _changed(wrong)


def _read_row_tables(metadata: CommonAttentionMetadata, n: int) -> list[Any]:
    """The block table of every row in the groups that the step was built from."""
    slot_mapping = own_arrays(metadata.host).slot_mapping[:n]
    if slot_mapping.min() < 0:
        raise ValueError(f"metadata: row {int(slot_mapping.argmin())} is of a profiling run, without blocks")
    groups = metadata.source.groups if metadata.source is not None else ()
    sequences = [sequence for group in groups for sequence in own_items(group[1])]
    if any(not isinstance(sequence, tuple) or len(own_items(sequence)) < 4 for sequence in sequences):
        raise error_texts.changed_groups()
    tables = [own_items(sequence)[3] for sequence in sequences]
    tables = [table if isinstance(table, (list, tuple, np.ndarray)) else _Items(table) for table in tables]
    if len(tables) != n:
        raise ValueError(
            f"metadata: its groups have {counted(len(tables), 'sequence')} now, not {n}; build the step anew"
        )
    return tables


def _find_started_blocks(host: Any, settings: ListSettings, contexts: Int32Array, tables: list[Any]) -> Rows:
    """The rows whose tokens at ``contexts`` start a block, and the ids of the blocks; about 1 row in block_size."""
    block_size = settings.block_size
    rows = np.flatnonzero(contexts % block_size == 0)
    started = Rows(rows, np.empty(len(rows), np.int32))
    columns, previous_blocks = (contexts[rows] // block_size).tolist(), (host.slot_mapping[rows] // block_size).tolist()
    ids: list[Any] = []
    for row, column, last in zip(rows.tolist(), columns, previous_blocks, strict=True):
        table = tables[row]
        if len(table) <= column:
            problem = array_arguments.too_few_blocks(len(table), column * block_size + 1, block_size)
            raise ValueError(f"metadata: row {row} {problem}")
        if operator.index(table[column - 1]) != last:
            raise ValueError(
                f"metadata: row {row} was built from another table than its group has now; append to tables only, or "
                "build the step anew"
            )
        ids.append(table[column])
    if ids and settings.kernels.fill_block_table([ids], started.ids[np.newaxis]) >= 0:
        index = next(
            (index for index, block_id in enumerate(ids) if array_arguments.bad_block_ids([block_id], INT32_MAX + 1)), 0
        )
        raise ValueError(f"metadata: row {rows[index]}: block id {quoted(ids[index])} is no integer of 0..{INT32_MAX}")
    return started


def _read_grown_rows(
    metadata: CommonAttentionMetadata, settings: ListSettings, tables: list[Any], lens: list[int]
) -> Rows:
    """Whole rows of the table whose groups' tables have grown since the last step: lookahead blocks belong to it."""
    table, known = own_arrays(metadata.host).block_table, vars(metadata).get("_table_lens")
    if lens == known or (known is None and metadata.source is not None and sum(lens) == metadata.source.num_ids):
        return Rows(_NO_ROWS, np.empty((0, table.shape[1]), np.int32))
    # How long each table was at the build is not known: where one has grown since, all of them are read.
    grown = np.arange(len(lens)) if known is None else np.flatnonzero(np.array(lens) != known)
    width = max(table.shape[1], max(lens))
    if metadata.use_cuda_graph and width > table.shape[1]:
        width = table.shape[1]
        if not settings.dialect.cuts_lookahead:
            capture = settings.max_seq_len_to_capture or 0
            groups = metadata.source.groups if metadata.source is not None else ()
            raise error_texts.beyond_capture(groups, settings.block_size, None, capture, settings.dialect.name)
    longer = np.empty((len(grown), width), np.int32)
    bad = settings.kernels.fill_block_table(
        [tables[row] if lens[row] <= width else tables[row][:width] for row in grown.tolist()], longer
    )
    if bad >= 0:
        found = array_arguments.bad_block_ids(tables[grown[bad]], INT32_MAX + 1)
        raise ValueError(f"metadata: row {grown[bad]}: {found[1] if found else 'its table changed while it was read'}")
    if width == table.shape[1]:
        changed = (longer != table[grown]).any(axis=1)
        grown, longer = grown[changed], longer[changed]
    return Rows(grown, longer)


def _trim_rows(
    metadata: CommonAttentionMetadata,
    block_size: int,
    contexts: Int32Array,
    lengths: Int32Array,
    started: Rows,
) -> Rows:
    """Rows of a windowed table that change: they get a block, or the window passes one, or both."""
    table, n = own_arrays(metadata.host).block_table, len(contexts)
    counts, held = -(-lengths // block_size), -(-own_arrays(metadata.host).seq_lens[:n] // block_size)
    drops = contexts // block_size + 1 - counts > -(-contexts // block_size) - held
    changes = drops.copy()
    changes[started.rows] = True
    rows = np.flatnonzero(changes)
    width = table.shape[1] if metadata.use_cuda_graph else int(counts.max())
    ids = np.zeros((len(rows), max(width, table.shape[1])), np.int32)
    ids[:, : table.shape[1]] = table[rows]
    dropping = drops[rows]
    ids[dropping, :-1] = ids[dropping, 1:]
    ends = np.arange(len(rows)) * ids.shape[1] - 1  # ahead of each row: behind it, its numbers are counted from 1
    ids.put(ends[dropping] + held[rows[dropping]], 0)
    ids.put(ends[np.searchsorted(rows, started.rows)] + counts[started.rows], started.ids)
    return Rows(rows, ids[:, :width])
