"""The next step of a batch of decodes without a rebuild: list-door metadata moved on by one token, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import slots
from attncore.graphs import refuse_while_capturing

if TYPE_CHECKING:
    from attncore.builder.common import CommonMetadataBuilder
    from attncore.builder.metadata import CommonAttentionMetadata

Arrays = dict[str, npt.NDArray[Any]]


def advance_step(
    metadata: CommonAttentionMetadata,
    input_tokens: Any = None,
    sampled_token_ids: Any = None,
    num_queries: int | None = None,
) -> None:
    """Moves decodes that CommonMetadataBuilder built on by the token that each has sampled, in place.

    Afterwards every field is what a build of the longer sequences would answer, on the device too; views and plans are
    made anew. Arrays keep their addresses, but for ``paged_kv_indices``, whose length follows the pages in use, and a
    windowed ``block_table`` whose width changes. ``sampled_token_ids`` (n of them, an array or tensor) become the first
    n of ``input_tokens`` int[num_reqs], where padded requests get 0. ``num_queries`` is n, the decodes without padding.

    The whole tables are read from the groups of the build when it is first advanced, and again when a row runs out of
    them: an engine may append blocks to its lists, and must leave the others. Raises ValueError or TypeError that names
    the argument or the row, and changes nothing, for a step with prompts, a decode of several tokens, a token without a
    block, and a step that a captured graph cannot hold any more.
    """
    source = _source_of(metadata)
    builder: CommonMetadataBuilder = source[0]
    n = _checked_queries(metadata, num_queries)
    tokens = _checked_tokens(metadata, n, input_tokens, sampled_token_ids)
    refuse_while_capturing("cpu" if builder.backend is None else builder.backend.config.device, "advance_step")

    fields, longest = _advanced_fields(metadata, builder, n)
    before = {name: getattr(metadata.host, name).copy() for name in fields} if builder._plan else {}
    counts = metadata.max_seq_len, metadata.max_decode_seq_len
    _write(metadata, fields, longest, longest, 1)
    if builder._plan:
        try:
            builder._plan(metadata)
        except BaseException:
            _write(metadata, before, *counts, -1)
            raise
    if tokens is not None:
        input_tokens[:n] = tokens
        input_tokens[n : metadata.num_reqs] = 0


def _source_of(metadata: CommonAttentionMetadata) -> tuple[Any, Any]:
    if metadata._source is None:
        raise ValueError(
            "metadata: not as CommonMetadataBuilder.build gave it (a view, a captured size, or of the other door); "
            "advance the built step"
        )
    if metadata.num_prefills:
        raise ValueError(f"metadata: {metadata.num_prefills} prompts in the step; only decodes advance without a build")
    if metadata.max_query_len > 1:
        row = int(np.argmax(metadata.host.query_lens > 1))
        raise ValueError(
            f"metadata: row {row} ran {metadata.host.query_lens[row]} tokens; decodes of one token advance, so build "
            "this step anew"
        )
    found: tuple[Any, Any] = metadata._source
    return found


def _checked_queries(metadata: CommonAttentionMetadata, num_queries: int | None) -> int:
    n = len(metadata.host.query_lens)
    if num_queries is not None and slots._integer("num_queries", num_queries, 1) != n:
        raise ValueError(f"num_queries: {num_queries}, but the step has {n} decodes without padding; build it anew")
    return n


def _checked_tokens(metadata: CommonAttentionMetadata, n: int, input_tokens: Any, sampled: Any) -> Any:
    """The n sampled tokens as one row, None where the engine gave none."""
    if input_tokens is None and sampled is None:
        return None
    for name, value, length in (("input_tokens", input_tokens, metadata.num_reqs), ("sampled_token_ids", sampled, n)):
        if value is None:
            raise TypeError(f"{name}: missing; give input_tokens and sampled_token_ids both, or neither")
        if not hasattr(value, "shape") or "int" not in str(value.dtype):
            raise TypeError(f"{name}: {type(value).__name__} is not an array or tensor of integers")
        shape = tuple(value.shape)
        if name == "input_tokens" and len(shape) != 1:
            raise ValueError(f"input_tokens: {list(shape)}; it must have one dimension")
        if int(np.prod(shape)) < length:
            raise ValueError(f"{name}: {int(np.prod(shape))} tokens for the {length} rows of the step")
    tokens = sampled.reshape(-1)[:n]
    if not isinstance(input_tokens, np.ndarray) and isinstance(tokens, np.ndarray):
        import torch

        return torch.from_numpy(tokens)
    return tokens


def _advanced_fields(metadata: CommonAttentionMetadata, builder: CommonMetadataBuilder, n: int) -> tuple[Arrays, int]:
    """The fields of the next step that differ, and its longest length."""
    host, size, num_reqs = metadata.host, builder.block_size, metadata.num_reqs
    contexts = host.context_lens + np.int32(1)
    tables, are_new = _Tables.of(metadata, builder, contexts)
    too_long = np.flatnonzero(contexts == slots.INT32_MAX)
    if len(too_long):
        raise ValueError(f"metadata: row {too_long[0]} cannot grow beyond {slots.INT32_MAX} tokens")
    lengths = contexts + np.int32(1)
    kernel_lens = lengths if builder.sliding_window is None else _capped(lengths, builder.sliding_window, size)
    longest = int(kernel_lens.max())
    capture = builder.max_seq_len_to_capture
    if metadata.use_cuda_graph and longest > (capture or 0):
        raise ValueError(
            f"max_seq_len_to_capture: {capture} is below the length {longest} of row {int(kernel_lens.argmax())}; run "
            "the step without a graph"
        )
    fields: Arrays = {
        "context_lens": contexts,
        "positions": np.zeros(num_reqs, np.int64),
        "slot_mapping": np.full(num_reqs, slots.PAD_SLOT_ID, np.int64),
        "seq_lens": np.ones(num_reqs, np.int32),
    }
    fields["positions"][:n] = contexts
    fields["seq_lens"][:n] = kernel_lens
    fields["seq_start_loc"] = _sums(fields["seq_lens"], "lengths")
    builder._kernels.fill_slot_mapping(tables.ids, contexts, host.query_lens, size, fields["slot_mapping"][:n])
    if builder.layout.page_lists:
        pages = np.zeros(num_reqs, np.int32)
        pages[:n] = contexts // size + 1
        indptr = fields["paged_kv_indptr"] = _sums(pages, "pages")
        fields["paged_kv_indices"] = np.empty(int(indptr[-1]), np.int32)
        builder._kernels.fill_page_indices(tables.ids, indptr[: n + 1], fields["paged_kv_indices"])
        fields["paged_kv_last_page_len"] = np.zeros(num_reqs, np.int32)
        fields["paged_kv_last_page_len"][:n] = contexts % size + 1
    width = host.block_table.shape[1] if metadata.use_cuda_graph else None
    if builder.sliding_window is not None:
        fields["block_table"] = tables.trimmed(contexts // size + 1, -(-kernel_lens // size), num_reqs, width)
    elif are_new:
        if width is not None and tables.counts.max() > width and not builder.layout.cuts_lookahead:
            row = int(tables.counts.argmax())
            raise ValueError(
                f"metadata: row {row} holds {tables.counts[row]} blocks, more than the {width} columns of "
                f"max_seq_len_to_capture {capture} (layout {builder.layout.name} cuts no lookahead)"
            )
        fields["block_table"] = tables.trimmed(tables.counts, tables.counts, num_reqs, width)
    return fields, longest


def _capped(lengths: slots.Int32Array, window: int, size: int) -> slots.Int32Array:
    """Lengths given to the kernel of decodes with a window."""
    return np.minimum(lengths, -(-window // size) * size + lengths.astype(np.int64) % size).astype(np.int32)


def _sums(lengths: slots.Int32Array, what: str) -> slots.Int32Array:
    sums = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=sums[1:])
    if sums[-1] > slots.INT32_MAX:
        raise ValueError(f"metadata: {what} of this step do not fit int32 in all")
    return sums.astype(np.int32)


def _write(metadata: CommonAttentionMetadata, fields: Arrays, max_seq_len: int, max_decode: int, advanced: int) -> None:
    host, wrapped = metadata.host, vars(metadata)
    for name, value in fields.items():
        held = getattr(host, name)
        if held.shape != value.shape:
            setattr(host, name, value)
            wrapped.pop(name, None)
            continue
        held[...] = value
        on_device = wrapped.get(name, held)
        if on_device is not held and on_device.data_ptr() != held.__array_interface__["data"][0]:
            import torch

            # Memory that is not pinned is staged before this returns, and may be written to again.
            on_device.copy_(torch.from_numpy(held), non_blocking=True)
    for name in ("_prefill", "_decode", "_bound"):
        wrapped.pop(name, None)
    metadata.max_seq_len, metadata.max_decode_seq_len = max_seq_len, max_decode
    metadata.advanced += advanced


class _Tables:
    """The whole tables of a step's decodes: ``ids`` int32[n, width], of which row i has ``counts[i]`` columns."""

    def __init__(self, ids: slots.Int32Array, counts: slots.Int32Array) -> None:
        self.ids, self.counts = ids, counts

    @classmethod
    def of(
        cls, metadata: CommonAttentionMetadata, builder: CommonMetadataBuilder, contexts: slots.Int32Array
    ) -> tuple[_Tables, bool]:
        """Those read before, or now where there are none or a token at ``contexts`` has no block; and whether now."""
        columns = contexts // builder.block_size
        held: _Tables | None = vars(metadata).get("_tables")
        found = cls._read(metadata, builder) if held is None or (columns >= held.counts).any() else held
        short = np.flatnonzero(columns >= found.counts)
        if len(short):
            row = int(short[0])
            raise ValueError(
                f"metadata: row {row} holds {found.counts[row]} blocks but token {contexts[row]} needs block "
                f"{columns[row]} (block_size {builder.block_size})"
            )
        vars(metadata)["_tables"] = found
        return found, found is not held

    @classmethod
    def _read(cls, metadata: CommonAttentionMetadata, builder: CommonMetadataBuilder) -> _Tables:
        host, groups = metadata.host, metadata._source[1]
        rows = [sequence[3] for group in groups for sequence in group[1]]
        changed = ValueError(
            "metadata: the block tables of its groups are not those that it was built from; leave them as they were, "
            "but for blocks appended, or build this step anew"
        )
        if len(rows) != len(host.query_lens):
            raise changed
        for row, table in enumerate(rows):
            if table is None:
                raise ValueError(f"metadata: row {row} is profiled (its block_table is None) and cannot advance")
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        window = builder.sliding_window
        beyond = 0 if window is None else -(-window // builder.block_size) + 1  # room to cut a row's end from
        ids = np.empty((len(rows), int(counts.max()) + min(beyond, int(counts.max()))), np.int32)
        if builder._kernels.fill_block_table(rows, ids) >= 0:
            raise changed
        found = cls(ids, counts)
        blocks = -(-(host.context_lens + np.int32(1)) // builder.block_size)
        held = -(-host.seq_lens[: len(rows)] // builder.block_size)
        if (blocks > counts).any():
            raise changed
        mine, theirs = found.trimmed(blocks, held, len(rows), None), host.block_table[: len(rows), : int(held.max())]
        if (np.where(np.arange(mine.shape[1]) < held[:, np.newaxis], theirs, 0) != mine).any():
            raise changed
        return found

    def trimmed(
        self, blocks: slots.Int32Array, counts: slots.Int32Array, num_reqs: int, width: int | None
    ) -> slots.Int32Array:
        """The last ``counts`` of the first ``blocks`` blocks of every row, int32[num_reqs, width], padded with 0.

        ``width`` None: as wide as the longest row; a longer row is cut.
        """
        widest = int(counts.max())
        table = np.zeros((num_reqs, widest if width is None else width), np.int32)
        widest = min(widest, table.shape[1])
        every_start = np.lib.stride_tricks.sliding_window_view(self.ids, widest, axis=1)
        found = every_start[np.arange(len(counts)), blocks - counts]
        found[np.arange(widest) >= counts[:, np.newaxis]] = 0
        table[: len(counts), :widest] = found
        return table
