"""Chunked local attention as virtual batches, which a kernel without support for chunks can run.

A token sees the tokens of its own chunk, up to itself; chunks begin at multiples of ``chunk_size`` of the request. Each
(request, chunk) that this step's queries touch becomes a virtual request with its own context, plain causal attention
and the blocks of that chunk only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array
from attncore.builder.blocks.check_whole_requests import check_whole_requests
from attncore.builder.fields import COUNTS
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.builder.slices import HostArrays, own_array
from attncore.kernels import host_functions
from attncore.show import counted

_MOST_BLOCKS = (INT32_MAX + 1) // 4  # of all tables of a virtual batch: 2 GiB
_MOST_CHUNKS = 1 << 20  # of a virtual batch: three numbers may ask for 2**31, which take minutes and all memory


class VirtualBatch(NamedTuple):
    """v virtual requests, in the order of the batch's tokens; host arrays."""

    query_lens: Int32Array
    """int32[v]: tokens of this step in the chunk."""
    seq_lens: Int32Array
    """int32[v]: keys of the chunk, up to the last query."""
    query_start_loc: Int32Array
    """int32[v + 1]: where each starts among the step's tokens, whose order does not change."""
    seq_start_loc: Int32Array
    """int32[v + 1]: prefix sums of seq_lens."""
    block_table: Int32Array
    """int32[v, chunk_size // block_size]: the chunk's blocks that hold keys, padded with 0."""
    request_indices: Int32Array
    """int32[v]: the row of the request that each belongs to."""
    chunk_indices: Int32Array
    """int32[v]: the index of each chunk in its request."""


def local_attention_batches(
    query_lens: npt.ArrayLike, seq_lens: npt.ArrayLike, block_table: npt.ArrayLike, chunk_size: int, block_size: int
) -> VirtualBatch:
    """The virtual batch of a batch: lengths int[n], ``block_table`` int[n, width], on the host.

    ``chunk_size`` is a multiple of ``block_size``, both in tokens. A request without tokens in this step gives no
    virtual request. A chunk without context reads no cache, so that its blocks may be missing from the table (plain
    prompts of the list builder); otherwise a row that is too short for a chunk raises ValueError,
    and so do more than 2**20 virtual requests.
    """
    chunk_size, block_size = _check_sizes(chunk_size, block_size)
    queries = array_arguments.lengths("query_lens", query_lens, 0)
    lens = array_arguments.lengths("seq_lens", seq_lens, 0)
    contexts = array_arguments.contexts(queries, lens).astype(np.int64)
    table = array_arguments.block_table(block_table, len(queries))

    first_chunks = contexts // chunk_size
    num_chunks = np.where(queries > 0, -(-lens.astype(np.int64) // chunk_size) - first_chunks, 0)
    count, blocks_per_chunk = int(num_chunks.sum()), chunk_size // block_size
    if count > _MOST_CHUNKS or count * blocks_per_chunk > _MOST_BLOCKS:
        raise ValueError(
            f"chunk_size: {counted(count, 'chunk')} of {counted(blocks_per_chunk, 'block')} each, more than "
            f"{_MOST_CHUNKS} chunks or tables "
            f"of {_MOST_BLOCKS} blocks; give a {'larger' if count > _MOST_CHUNKS else 'smaller'} one"
        )
    rows = np.repeat(np.arange(len(queries)), num_chunks)
    chunks = first_chunks[rows] + np.arange(len(rows)) - (np.cumsum(num_chunks) - num_chunks)[rows]
    starts, stops = chunks * chunk_size, np.minimum((chunks + 1) * chunk_size, lens[rows])
    virtual_queries = stops - np.maximum(starts, contexts[rows])
    virtual_lens = stops - starts
    return VirtualBatch(
        virtual_queries.astype(np.int32),
        virtual_lens.astype(np.int32),
        host_functions.build_query_start_loc(virtual_queries),
        host_functions.build_query_start_loc(virtual_lens),
        _build_chunk_tables(table, rows, chunks, virtual_lens, virtual_queries, blocks_per_chunk, block_size),
        rows.astype(np.int32),
        chunks.astype(np.int32),
    )


def local_attention_metadata(
    metadata: CommonAttentionMetadata, chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """``metadata`` with virtual requests in place of requests, which a backend runs like any other batch.

    Tokens, slots and positions are those of the batch. ``logits_indices`` are the last tokens of virtual requests: for
    sampling, use those of the batch, as its ``placeholder_maps``. Virtual requests of decodes are decodes. Raises
    ValueError for a batch that is padded for a graph, of a cross group or of one rank of several, and for lengths that
    a sliding window has capped.
    """
    check_metadata("metadata", metadata)
    host = metadata.host
    chunk_size, block_size = _check_sizes(chunk_size, block_size)
    check_whole_requests(metadata, "chunks are of whole requests")
    virtual = local_attention_batches(host.query_lens, host.seq_lens, host.block_table, chunk_size, block_size)
    rows, count = virtual.request_indices, len(virtual.request_indices)
    fields = HostArrays(
        slot_mapping=own_array(host, "slot_mapping"),
        positions=own_array(host, "positions"),
        token_to_req_indices=np.repeat(np.arange(count, dtype=np.int32), virtual.query_lens),
        seq_lens=virtual.seq_lens,
        context_lens=virtual.seq_lens - virtual.query_lens,
        query_lens=virtual.query_lens,
        logits_indices=virtual.query_start_loc[1:] - np.int32(1),
        query_start_loc=virtual.query_start_loc,
        seq_start_loc=virtual.seq_start_loc,
        block_table=virtual.block_table,
    )
    if hasattr(host, "paged_kv_indptr"):
        lists = metadata.from_groups and hasattr(host, "paged_kv_indices")
        build = _chunks_of_pages if lists else _pages_of_tables
        pages = build(host, virtual, chunk_size // block_size, block_size)
        fields.paged_kv_indptr, fields.paged_kv_indices, fields.paged_kv_last_page_len = pages
    is_decode = rows < metadata.num_decodes if metadata.decodes_first else rows >= metadata.num_prefills
    longest = [int(virtual.seq_lens[mask].max(initial=0)) for mask in (is_decode, ~is_decode)]
    num_decodes = int(is_decode.sum())
    counts = {name: getattr(metadata, name) for name in COUNTS} | {
        "num_reqs": count,
        "num_decodes": num_decodes,
        "num_prefills": count - num_decodes,
        "max_query_len": int(virtual.query_lens.max(initial=0)),
        "max_seq_len": max(longest),
        "max_decode_seq_len": longest[0],
        "max_prefill_seq_len": longest[1],
        "max_decode_query_len": int(virtual.query_lens[is_decode].max(initial=0)) or 1,
        **dict.fromkeys(("num_encoder_tokens", "max_encoder_seq_len"), 0),
    }
    return CommonAttentionMetadata(
        fields,
        metadata._wrap,
        **counts,
        req_ids=tuple(metadata.req_ids[row] for row in rows.tolist()) if metadata.req_ids else (),
        decodes_first=metadata.decodes_first,
        from_groups=metadata.from_groups,
    )


def _pages_of_tables(
    host: Any, virtual: VirtualBatch, blocks_per_chunk: int, block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The page lists of a virtual batch by its tables: starts, indices, tokens in the last pages."""
    return host_functions.build_page_lists(virtual.block_table, virtual.seq_lens, block_size)


def _chunks_of_pages(
    host: Any, virtual: VirtualBatch, blocks_per_chunk: int, block_size: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The same by the page lists of a step of the list builder, where a plain prompt has pages and no table, and of a
    profiling run, which has none.
    """
    indptr, indices = host.paged_kv_indptr, host.paged_kv_indices
    pages, wanted = np.diff(indptr), -(-host.seq_lens // block_size)
    other = np.flatnonzero((pages > 0) & (pages != wanted))
    if len(other):
        row = int(other[0])
        raise ValueError(
            f"block_size: {block_size} found, but row {row} has {counted(host.seq_lens[row], 'token')} in "
            f"{counted(pages[row], 'page')}, not {wanted[row]}; give the block size of the step's builder"
        )
    held = pages.take(virtual.request_indices) > 0
    counts = np.where(held, -(-virtual.seq_lens // block_size), 0)
    starts = host_functions.build_query_start_loc(counts)
    first = indptr.take(virtual.request_indices) + virtual.chunk_indices * blocks_per_chunk
    picked = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
    last = np.where(held, virtual.seq_lens - (counts - 1) * block_size, 0).astype(np.int32)
    return starts, indices[picked], last


def _check_sizes(chunk_size: int, block_size: int) -> tuple[int, int]:
    """Both as ints; ValueError where a chunk is no whole number of blocks."""
    block_size = arguments.integer("block_size", block_size, 1)
    chunk_size = arguments.integer("chunk_size", chunk_size, 1)
    if chunk_size % block_size:
        raise ValueError(f"chunk_size: {chunk_size} is no multiple of block_size {block_size}; a chunk is whole blocks")
    return chunk_size, block_size


def _build_chunk_tables(
    table: Int32Array,
    rows: npt.NDArray[np.intp],
    chunks: npt.NDArray[np.int64],
    lens: npt.NDArray[np.int64],
    query_lens: npt.NDArray[np.int64],
    blocks_per_chunk: int,
    block_size: int,
) -> Int32Array:
    """The blocks of each chunk that hold keys, padded with 0."""
    num_blocks = -(-lens // block_size)
    last = chunks * blocks_per_chunk + num_blocks
    short = np.flatnonzero((last > table.shape[1]) & (lens > query_lens))
    if len(short):
        row, needed = int(rows[short[0]]), int(last[short[0]])
        raise ValueError(
            f"block_table: row {row} holds {counted(table.shape[1], 'block')} but needs {needed} up to chunk "
            f"{chunks[short[0]]} (block_size {block_size}); append {needed - table.shape[1]}"
        )
    width = min(blocks_per_chunk, table.shape[1])  # beyond the batch's table all are 0
    columns = chunks[:, np.newaxis] * blocks_per_chunk + np.arange(width)
    holds = (np.arange(width) < num_blocks[:, np.newaxis]) & (columns < table.shape[1])
    tables = np.zeros((len(rows), blocks_per_chunk), np.int32)
    picked = np.nonzero(holds)
    tables[picked] = table[rows[picked[0]], columns[picked]]
    return tables
