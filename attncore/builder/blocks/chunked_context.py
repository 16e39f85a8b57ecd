"""Contexts in chunks: a prefill attends to a long cached context through a workspace that holds a part of it.

For latent (MLA) caches, whose rows must be projected to keys and values before a prefill can read them. Chunk by chunk,
rows are gathered, projected up and attended to without a mask, with log-sum-exp; the step's own tokens are attended to
causally; ``attncore.merge.merge_attention`` combines the parts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.array_arguments import Int32Array, Int64Array
from attncore.builder.blocks.check_whole_requests import check_exact_lengths
from attncore.builder.checked_backend import check_backend
from attncore.builder.fields import ARRAYS, COUNTS, DERIVED, ENCODER_ARRAYS
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.builder.slices import HostArrays, own_array
from attncore.kernels import codes, host_functions
from attncore.show import counted

_MOST_CHUNKS = 1 << 20
_MOST_LENS = 1 << 26  # of all chunks: 256 MiB
_TOKENS = 1 << 20  # whose slots are ordered at once


class ContextChunks(NamedTuple):
    """The contexts of n prefills in chunks, on the host; c is the number of chunks, 0 without context."""

    chunk_starts: Int32Array
    """int32[c, n]: tokens of each context in earlier chunks; whole blocks until it ends."""
    chunk_seq_lens: Int32Array
    """int32[c, n]: tokens of each context in the chunk; 0 where it has ended."""
    chunk_start_loc: Int32Array
    """int32[c, n + 1]: prefix sums of chunk_seq_lens, for each chunk."""
    chunk_slots: tuple[Int64Array, ...]
    """c arrays int64[tokens of the chunk]: their slots in the cache, prefill after prefill."""

    @property
    def num_chunks(self) -> int:
        """c, the number of times that the workspace is filled."""
        return len(self.chunk_slots)

    @property
    def num_chunk_tokens(self) -> Int32Array:
        """int32[c]: tokens of each chunk."""
        return self.chunk_start_loc[:, -1]

    @property
    def max_chunk_len(self) -> Int32Array:
        """int32[c]: the most tokens that a prefill has in the chunk."""
        longest: Int32Array = self.chunk_seq_lens.max(axis=1, initial=0)
        return longest


def context_chunks(
    block_table: npt.ArrayLike, context_lens: npt.ArrayLike, block_size: int, workspace_tokens: int
) -> ContextChunks:
    """The chunks of the contexts of n prefills: ``block_table`` int[n, width], ``context_lens`` int[n], tokens.

    A chunk holds at most ``workspace_tokens``, divided evenly among the prefills that have context left; what short
    ones leave goes to longer ones. A share is whole blocks. Raises ValueError where the workspace is less than a block
    for each prefill with context, a table is too short for its context, or there are more than 2**20 chunks, or 2**26
    lengths in all of them.
    """
    block_size = arguments.integer("block_size", block_size, 1)
    workspace_tokens = arguments.integer("workspace_tokens", workspace_tokens, 1)
    contexts = array_arguments.lengths("context_lens", context_lens, 0)
    table = array_arguments.block_table(block_table, len(contexts))
    waiting = int(np.count_nonzero(contexts))
    if workspace_tokens < waiting * block_size:
        raise ValueError(
            f"workspace_tokens: {workspace_tokens} is less than a block of {counted(block_size, 'token')} for each of "
            f"{counted(waiting, 'prefill')} with context; give {waiting * block_size} or more, or run fewer prefills"
        )
    array_arguments.at_most("context_lens", int(contexts.sum(dtype=np.int64)), array_arguments.MOST_TOKENS, "tokens")
    lens = _chunk_lens(contexts, workspace_tokens, block_size)
    starts = np.cumsum(lens, axis=0, dtype=np.int32) - lens
    sums = np.zeros((len(lens), len(contexts) + 1), np.int32)
    np.cumsum(lens, axis=1, out=sums[:, 1:])
    return ContextChunks(starts, lens, sums, _chunk_slots(table, contexts, block_size, starts, sums))


def _chunk_lens(contexts: Int32Array, workspace_tokens: int, block_size: int) -> Int32Array:
    """int32[c, n]: the tokens of each context in each chunk; ValueError for more than _MOST_CHUNKS, _MOST_LENS."""
    runs, num_chunks, left = [np.zeros((0, len(contexts)), np.int32)], 0, contexts.copy()
    while left.any():  # two runs of like chunks at most until another context ends
        taken, count = _share_workspace(left, workspace_tokens, block_size)
        num_chunks += count
        if num_chunks > _MOST_CHUNKS or num_chunks * len(contexts) > _MOST_LENS:
            raise ValueError(
                f"workspace_tokens: {workspace_tokens} divide the contexts of {counted(len(contexts), 'prefill')} "
                f"into {counted(num_chunks, 'chunk')} or more, beyond {_MOST_CHUNKS} chunks or {_MOST_LENS} lengths "
                "in all; give a larger workspace, or run fewer prefills"
            )
        runs.append(np.broadcast_to(taken, (count, len(taken))))
        left = left - np.int32(count) * taken
    return np.concatenate(runs)


def _chunk_slots(
    table: Int32Array, contexts: Int32Array, block_size: int, starts: Int32Array, sums: Int32Array
) -> tuple[Int64Array, ...]:
    """The slots of each chunk, prefill after prefill, as parts of one array; ValueError where a table is too short."""
    by_prefill = host_functions.build_slot_mapping(table, np.zeros_like(contexts), contexts, block_size)
    slots, first = np.empty_like(by_prefill), np.cumsum(contexts, dtype=np.int64) - contexts
    ends = np.cumsum(sums[:, -1], dtype=np.int64)
    at = 0
    while at < len(ends):  # as many chunks at once as have _TOKENS, and one at least
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + _TOKENS, side="right")))
        lens = np.diff(sums[at:stop], axis=1).ravel()
        shifts = (first + starts[at:stop]).ravel() - (np.cumsum(lens, dtype=np.int64) - lens)
        count = int(ends[stop - 1]) - done
        slots[done : done + count] = by_prefill[np.repeat(shifts, lens) + np.arange(count)]
        at = stop
    bounds = [0, *ends.tolist()]
    return tuple(slots[start:end] for start, end in pairwise(bounds))


def context_chunk_metadata(
    metadata: CommonAttentionMetadata, chunks: ContextChunks, index: int, backend: Any = None
) -> CommonAttentionMetadata:
    """The step with the gathered keys of chunk ``index``, for a layer of type ``encoder_decoder``.

    ``metadata`` holds the prefills that ``chunks`` was made of (``metadata.prefill_metadata``). The
    layer attends to them without a mask and writes nothing: its slots are -1, and its ``kv_cache`` may be None.
    ``backend`` wraps the arrays (None: as the batch's). Refused for a step whose lengths the device alone knows.
    """
    check_metadata("metadata", metadata)
    check_exact_lengths(metadata, "chunks of contexts hold the keys of rejected tokens otherwise")
    if not isinstance(chunks, ContextChunks):
        raise TypeError(f"chunks: {type(chunks).__name__} found; give what context_chunks returned")
    index = arguments.integer("index", index, 0)
    if index >= chunks.num_chunks:
        raise ValueError(f"index: {index} found; there are {counted(chunks.num_chunks, 'chunk')}")
    lens, starts = chunks.chunk_seq_lens[index], chunks.chunk_start_loc[index]
    if len(lens) != metadata.num_reqs:
        raise ValueError(
            f"chunks: made of {counted(len(lens), 'prefill')}, but the metadata has "
            f"{counted(metadata.num_reqs, 'request')}"
        )
    fields = _decoder_fields(metadata) | {
        "encoder_seq_lens": lens,
        "encoder_query_lens": lens,
        "encoder_seq_start_loc": starts,
        "encoder_query_start_loc": starts,
        "cross_slot_mapping": np.full(int(starts[-1]), codes.PAD_SLOT_ID, np.int64),
        "cross_block_table": np.zeros((len(lens), 0), np.int32),
    }
    counts = {"num_encoder_tokens": int(starts[-1]), "max_encoder_seq_len": int(lens.max(initial=0))}
    return _new_metadata(metadata, fields, counts, backend)


def new_tokens_metadata(metadata: CommonAttentionMetadata, backend: Any = None) -> CommonAttentionMetadata:
    """The step's own tokens as a causal batch without context: the part beside the chunks.

    Slots are -1 and tables empty: the cache is neither written nor read, and ``kv_cache`` may be None. ``backend``
    wraps the arrays (None: as the batch's).
    """
    check_metadata("metadata", metadata)
    host = metadata.host
    queries, num_reqs = own_array(host, "query_lens"), len(host.query_lens)
    fields = _decoder_fields(metadata) | {
        "slot_mapping": np.full(len(host.slot_mapping), codes.PAD_SLOT_ID, np.int64),
        "positions": host_functions.build_positions(np.zeros_like(queries), queries)[0],
        "seq_lens": queries,
        "context_lens": np.zeros_like(queries),
        "seq_start_loc": own_array(host, "query_start_loc"),
        "block_table": np.zeros((num_reqs, 0), np.int32),
        "paged_kv_indptr": np.zeros(num_reqs + 1, np.int32),
        "paged_kv_indices": np.zeros(0, np.int32),
        "paged_kv_last_page_len": np.zeros(num_reqs, np.int32),
    }
    if "span_ends" in fields:  # positions, which begin at 0 here
        ends, contexts = fields["span_ends"], host.context_lens.take(host.token_to_req_indices)
        fields["span_ends"] = np.where(ends != 0, ends - contexts, ends)
    longest = dict.fromkeys(("max_seq_len", "max_prefill_seq_len"), metadata.max_query_len)
    return _new_metadata(metadata, fields, longest, backend)


def _share_workspace(left: Int32Array, workspace_tokens: int, block_size: int) -> tuple[Int32Array, int]:
    """The tokens of each context in the next chunk: all that is left, or an even share of the workspace in blocks; and
    how many chunks in turn have them.
    """
    waiting = np.sort(left[left > 0]).astype(np.int64)
    before = np.cumsum(waiting) - waiting
    shares = (workspace_tokens - before) // np.arange(len(waiting), 0, -1)
    short = np.flatnonzero(waiting > shares)
    if not len(short):
        return left, 1
    share = int(shares[short[0]])  # that of the first context, by length, that does not fit whole
    blocks = share // block_size * block_size
    taken = np.where(left <= share, left, np.int32(blocks))
    return taken, -(-(int(waiting[0]) - share) // blocks) if short[0] == 0 else 1  # until the shortest fits whole


def _decoder_fields(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    """The host arrays of a step of prefills, without those of an encoder."""
    if metadata.num_prefills != metadata.num_reqs:
        raise ValueError(
            f"metadata: {counted(metadata.num_prefills, 'prefill')} in {counted(metadata.num_reqs, 'request')}; "
            "take its prefill_metadata"
        )
    names = ARRAYS.difference(ENCODER_ARRAYS, ("paged_kv_indices",))
    arrays = ((name, own_array(metadata.host, name)) for name in names - DERIVED)
    return {name: array for name, array in arrays if array is not None}


def _new_metadata(
    metadata: CommonAttentionMetadata, fields: dict[str, Any], counts: dict[str, int], backend: Any
) -> CommonAttentionMetadata:
    if backend is not None:
        check_backend(backend)
    whole = {name: getattr(metadata, name) for name in COUNTS if hasattr(metadata, name)}
    none = {"num_encoder_tokens": 0, "max_encoder_seq_len": 0}
    return CommonAttentionMetadata(
        HostArrays(**fields),
        metadata._wrap if backend is None else backend.from_host,
        **(whole | none | counts),
        req_ids=metadata.req_ids,
        decodes_first=metadata.decodes_first,
        from_groups=metadata.from_groups,
    )
