"""advance_step: moves a step of decodes of the list builder on by one token, in place, without a rebuild."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array
from attncore.builder.lists import error_texts
from attncore.builder.metadata import OF_ARRAYS, CommonAttentionMetadata
from attncore.graphs import refuse_while_capturing

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings


# The host arrays that change.
_FIELDS = (
    "context_lens", "positions", "slot_mapping", "seq_lens", "seq_start_loc", "block_table", "paged_kv_indptr",
    "paged_kv_indices", "paged_kv_last_page_len",
)  # fmt: skip


_NO_ROWS = np.empty(0, np.intp)

_WRITTEN = tuple(name for name in _FIELDS if name not in ("block_table", "paged_kv_indices"))
"""Those that keep their memory. Of a table some rows change, or it is replaced; page indices are replaced."""


class _Rows(NamedTuple):
    """Rows of the step, ascending, and for each a block id or a row of block ids."""

    rows: npt.NDArray[np.intp]
    ids: Int32Array


class _Next(NamedTuple):
    """The changes of the next step beyond adding 1 to lengths, positions and slots."""

    started: _Rows
    """Rows whose token starts a block, and the id of the block."""
    table: _Rows
    """Rows of ``block_table`` that change, with all their columns; their number may differ from the present width."""
    seq_lens: Int32Array | None
    """The lengths of decodes with a window; None: each grows by 1."""
    max_seq_len: int
    table_lens: list[int]
    """The lengths of the groups' tables; [] with a window, which leaves no lookahead blocks in a table."""


def advance_step(
    metadata: CommonAttentionMetadata,
    input_tokens: Any = None,
    sampled_token_ids: Any = None,
    num_queries: int | None = None,
) -> None:
    """Moves a step of decodes that CommonMetadataBuilder built on by one sampled token each, in place.

    Afterwards every field, on the host and on the device, is what a build of the longer sequences would give; views and
    plans are renewed. Arrays keep their addresses, except ``paged_kv_indices`` and a ``block_table`` whose shape
    changes (that of a step padded for a graph does not). ``sampled_token_ids``, n integers in an array or tensor, are
    written to the first n of ``input_tokens`` int[num_reqs], and 0 to those of padded requests. ``num_queries``, where
    given, must be n, the number of decodes without padding.

    A token that starts a block takes it from the tables of the groups that the step was built from: an engine may
    append to these tables, but must not change their entries. Raises ValueError or TypeError that names the argument or
    the row, and changes nothing, for a step with prompts, a decode of several tokens, a token without a block, and a
    step that a captured graph can no longer hold; CaptureError while a stream is capturing. Where an exception from
    outside interrupts it (KeyboardInterrupt), ``metadata.advanced`` says whether it has happened.
    """
    settings = _check_metadata(metadata)
    settle(metadata)
    n = len(metadata.host.query_lens)
    if num_queries is not None and arguments.integer("num_queries", num_queries, 1) != n:
        raise ValueError(f"num_queries: {num_queries}, but the step has {n} decodes without padding; build it anew")
    tokens = _check_tokens(metadata, n, input_tokens, sampled_token_ids)
    refuse_while_capturing("cpu" if settings.backend is None else settings.backend.config.device, "advance_step")
    step = _plan_next(metadata, settings, n)
    before = _before(metadata, step, None if tokens is None else input_tokens[: metadata.num_reqs])
    vars(metadata)["_unfinished"] = before
    try:
        _write(metadata, step, settings)
        if settings.plan is not None:
            settings.plan(metadata)
        if tokens is not None:
            input_tokens[:n] = tokens
            input_tokens[n : metadata.num_reqs] = 0
        del vars(metadata)["_unfinished"]
    except BaseException:
        settle(metadata)
        raise


def _check_metadata(metadata: CommonAttentionMetadata) -> ListSettings:
    """The settings of the step's builder; ValueError where the step cannot advance."""
    if metadata.source is None:
        raise ValueError(
            "metadata: not as CommonMetadataBuilder.build gave it (a view, a captured size, or of the persistent "
            "builder); advance the built step"
        )
    if metadata.num_prefills:
        raise ValueError(f"metadata: {metadata.num_prefills} prompts in the step; only decodes advance without a build")
    if metadata.max_query_len > 1:
        row = int(metadata.host.query_lens.argmax())
        raise ValueError(
            f"metadata: row {row} ran {metadata.max_query_len} tokens; decodes of one token advance, so build the step "
            "anew"
        )
    settings: ListSettings = metadata.source.builder
    return settings


def _check_tokens(metadata: CommonAttentionMetadata, n: int, input_tokens: Any, sampled: Any) -> Any:
    """The n sampled tokens in one dimension; None where the engine passed none."""
    if input_tokens is None and sampled is None:
        return None
    for name, value, length in (("input_tokens", input_tokens, metadata.num_reqs), ("sampled_token_ids", sampled, n)):
        if value is None:
            raise TypeError(f"{name}: missing; give input_tokens and sampled_token_ids both, or neither")
        if not hasattr(value, "shape") or "int" not in str(value.dtype):
            raise TypeError(f"{name}: {type(value).__name__} is not an array or tensor of integers")
        if len(value.reshape(-1)) < length:
            raise ValueError(f"{name}: {len(value.reshape(-1))} tokens for the {length} rows of the step")
    if len(input_tokens.shape) != 1:
        raise ValueError(f"input_tokens: {list(input_tokens.shape)}; it must have one dimension")
    if isinstance(input_tokens, np.ndarray) and not input_tokens.flags.writeable:
        raise ValueError("input_tokens: a read-only array; the sampled tokens are written to it")
    tokens = sampled.reshape(-1)[:n]
    _check_range(tokens, input_tokens.dtype)
    if isinstance(tokens, np.ndarray) and not isinstance(input_tokens, np.ndarray):
        import torch

        return torch.from_numpy(tokens)
    return tokens


def _check_range(tokens: Any, dtype: Any) -> None:
    """ValueError where a token does not fit ``dtype``. Tokens on a GPU are not looked at: that would wait for it."""
    if str(getattr(tokens, "device", "cpu")) != "cpu":
        return
    values, room = np.asarray(tokens), _limits(dtype)
    given = _limits(values.dtype)
    if given.min >= room.min and given.max <= room.max:
        return
    for value in (int(values.min()), int(values.max())):
        if not room.min <= value <= room.max:
            raise ValueError(f"sampled_token_ids: {value} does not fit input_tokens, which are {dtype}")


def _limits(dtype: Any) -> Any:
    """The ``min`` and ``max`` of an integer dtype of NumPy or torch."""
    if isinstance(dtype, np.dtype):
        return np.iinfo(dtype)
    import torch

    return torch.iinfo(dtype)


def _plan_next(metadata: CommonAttentionMetadata, settings: ListSettings, n: int) -> _Next:
    """Computes and checks the next step; writes nothing."""
    host, block_size, window = metadata.host, settings.block_size, settings.sliding_window
    tables = vars(metadata).get("_row_tables")
    if tables is None:
        tables = vars(metadata)["_row_tables"] = _read_row_tables(metadata, n)
    contexts = host.context_lens + np.int32(1)  # the positions of the new tokens
    longest = int(contexts.max()) + 1
    if longest > INT32_MAX:
        raise ValueError(f"metadata: row {int(contexts.argmax())} cannot grow beyond {INT32_MAX} tokens")
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
        return _Next(started, _read_grown_rows(metadata, settings, tables, table_lens), None, longest, table_lens)
    return _Next(started, _trim_rows(metadata, block_size, contexts, lengths, started), lengths, longest, [])


def _read_row_tables(metadata: CommonAttentionMetadata, n: int) -> list[Any]:
    """The block table of every row in the groups that the step was built from."""
    slot_mapping = metadata.host.slot_mapping[:n]
    if slot_mapping.min() < 0:
        raise ValueError(f"metadata: row {int(slot_mapping.argmin())} is of a profiling run, without blocks")
    groups = metadata.source.groups if metadata.source is not None else ()
    tables = [sequence[3] for group in groups for sequence in group[1]]
    if len(tables) != n:
        raise ValueError(f"metadata: its groups have {len(tables)} sequences now, not {n}; build the step anew")
    return tables


def _find_started_blocks(host: Any, settings: ListSettings, contexts: Int32Array, tables: list[Any]) -> _Rows:
    """The rows whose tokens at ``contexts`` start a block, and the ids of the blocks; about 1 row in block_size."""
    block_size = settings.block_size
    rows = np.flatnonzero(contexts % block_size == 0)
    started = _Rows(rows, np.empty(len(rows), np.int32))
    columns, previous_blocks = (contexts[rows] // block_size).tolist(), (host.slot_mapping[rows] // block_size).tolist()
    ids: list[Any] = []
    for row, column, last in zip(rows.tolist(), columns, previous_blocks, strict=True):
        table = tables[row]
        if len(table) <= column:
            raise ValueError(
                f"metadata: row {row} holds {len(table)} blocks but token {column * block_size} needs block {column} "
                f"(block_size {block_size})"
            )
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
        raise ValueError(f"metadata: row {rows[index]}: block id {ids[index]!r} is no integer of 0..{INT32_MAX}")
    return started


def _read_grown_rows(
    metadata: CommonAttentionMetadata, settings: ListSettings, tables: list[Any], lens: list[int]
) -> _Rows:
    """Whole rows of the table whose groups' tables have grown since the last step: lookahead blocks belong to it."""
    table, known = metadata.host.block_table, vars(metadata).get("_table_lens")
    if lens == known or (known is None and metadata.source is not None and sum(lens) == metadata.source.num_ids):
        return _Rows(_NO_ROWS, np.empty((0, table.shape[1]), np.int32))
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
    return _Rows(grown, longer)


def _trim_rows(
    metadata: CommonAttentionMetadata,
    block_size: int,
    contexts: Int32Array,
    lengths: Int32Array,
    started: _Rows,
) -> _Rows:
    """Rows of a windowed table that change: they get a block, or the window passes one, or both."""
    table, n = metadata.host.block_table, len(contexts)
    counts, held = -(-lengths // block_size), -(-metadata.host.seq_lens[:n] // block_size)
    drops = contexts // block_size + 1 - counts > -(-contexts // block_size) - held
    changes = drops.copy()
    changes[started.rows] = True
    rows = np.flatnonzero(changes)
    width = table.shape[1] if metadata.use_cuda_graph else int(counts.max())
    ids = np.zeros((len(rows), max(width, table.shape[1])), np.int32)
    ids[:, : table.shape[1]] = table[rows]
    dropping = drops[rows]
    ids[dropping, :-1] = ids[dropping, 1:]
    ids[dropping, held[rows[dropping]] - 1] = 0
    ids[np.searchsorted(rows, started.rows), counts[started.rows] - 1] = started.ids
    return _Rows(rows, ids[:, :width])


def _write(metadata: CommonAttentionMetadata, step: _Next, settings: ListSettings) -> None:
    host, (rows, ids) = metadata.host, step.started
    n, num_reqs = len(host.query_lens), metadata.num_reqs
    host.context_lens += 1
    host.positions[:n] += 1
    host.slot_mapping[:n] += 1
    host.slot_mapping[rows] = ids.astype(np.int64) * settings.block_size
    if step.seq_lens is None:
        host.seq_lens[:n] += 1
    else:
        host.seq_lens[:n] = step.seq_lens
    np.cumsum(host.seq_lens, out=host.seq_start_loc[1:])
    table, changed = host.block_table, step.table
    if changed.ids.shape[1] != table.shape[1]:
        host.block_table = np.zeros((num_reqs, changed.ids.shape[1]), np.int32)
        host.block_table[:, : table.shape[1]] = table[:, : changed.ids.shape[1]]
    if len(changed.rows):
        host.block_table[changed.rows] = changed.ids
    if settings.dialect.page_lists:
        host.paged_kv_last_page_len[:n] += 1
        host.paged_kv_last_page_len[rows] = 1
        if len(rows):
            _add_pages(host, settings, rows, ids)
    metadata.max_seq_len = metadata.max_decode_seq_len = step.max_seq_len
    metadata.advanced += 1
    vars(metadata)["_table_lens"] = step.table_lens
    _update_views(metadata, table_changed=len(changed.rows) > 0)


def _add_pages(host: Any, settings: ListSettings, rows: npt.NDArray[np.intp], ids: Int32Array) -> None:
    """Appends a page to the page lists of ``rows``."""
    indptr = host.paged_kv_indptr
    before, more = indptr[rows + 1], np.zeros(len(indptr), np.int32)
    more[rows + 1] = 1
    indptr += np.cumsum(more, dtype=np.int32)
    if settings.sliding_window is not None:  # the window trims the table, but not the page list
        host.paged_kv_indices = np.insert(host.paged_kv_indices, before, ids)
        return
    host.paged_kv_indices = np.empty(int(indptr[-1]), np.int32)
    n = len(host.query_lens)
    row = settings.kernels.fill_page_indices(host.block_table[:n], indptr[: n + 1], host.paged_kv_indices)
    if row >= 0:
        raise ValueError(f"metadata: paged_kv_indptr of row {row} was changed since the build; build the step anew")


def _update_views(metadata: CommonAttentionMetadata, table_changed: bool) -> None:
    """Updates what was made of the host arrays: copies to tensors at the same addresses, and drops views."""
    wrapped = vars(metadata)
    for name in ("_prefill", "_decode", *OF_ARRAYS):
        wrapped.pop(name, None)
    for name in _FIELDS:
        value = wrapped.get(name)
        if value is None or (name == "block_table" and not table_changed):
            continue
        array = getattr(metadata.host, name)
        if tuple(value.shape) != array.shape:
            del wrapped[name]
        elif isinstance(value, np.ndarray):
            wrapped[name] = array
        elif value.data_ptr() != array.__array_interface__["data"][0]:
            import torch

            # Memory that is not pinned was staged when this returns, so it may be written to again.
            value.copy_(torch.from_numpy(array), non_blocking=True)


class _Before(NamedTuple):
    """What an advance changes, as it was before."""

    arrays: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
    """Host arrays that are written in place, and copies of them."""
    table: npt.NDArray[np.int32]
    rows: npt.NDArray[np.intp]
    table_rows: npt.NDArray[np.int32]
    """The rows of ``table`` that change."""
    pages: Any
    attributes: dict[str, Any]
    tokens: tuple[Any, Any] | None
    """The engine's input tokens, and a copy of them."""


def _before(metadata: CommonAttentionMetadata, step: _Next, tokens: Any) -> _Before:
    host = metadata.host
    arrays = [array for name in _WRITTEN if (array := getattr(host, name, None)) is not None]
    rows = step.table.rows
    attributes = {name: getattr(metadata, name) for name in ("max_seq_len", "max_decode_seq_len", "advanced")}
    attributes["_table_lens"] = vars(metadata).get("_table_lens")
    kept = None
    if tokens is not None:
        if isinstance(tokens, np.ndarray):
            tokens = np.asarray(tokens)  # what a subclass does when it is written to is its own code
        kept = tokens, tokens.clone() if hasattr(tokens, "clone") else tokens.copy()
    return _Before(
        [(array, array.copy()) for array in arrays], host.block_table, rows, host.block_table[rows],
        getattr(host, "paged_kv_indices", None), attributes, kept,
    )  # fmt: skip


def settle(metadata: Any) -> None:
    """Takes back an advance that was interrupted, where one was; right to call again where it is interrupted itself."""
    before: _Before | None = vars(metadata).get("_unfinished")
    if before is None:
        return
    host = metadata.host
    for array, values in before.arrays:
        array[...] = values
    before.table[before.rows] = before.table_rows
    host.block_table = before.table
    if before.pages is not None:
        host.paged_kv_indices = before.pages
    vars(metadata).update(before.attributes)
    _update_views(metadata, table_changed=True)
    if before.tokens is not None:
        tokens, values = before.tokens
        with contextlib.suppress(Exception):  # the array of the engine refuses to be written to, which is reported
            tokens[...] = values
    del vars(metadata)["_unfinished"]
