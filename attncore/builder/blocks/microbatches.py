"""Slices of a batch and their metadata, for engines that overlap the work of microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.builder.blocks.check_whole_requests import first_partial, holds_trees
from attncore.builder.device_slices import DeviceView
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.builder.slices import is_cross, own_array, own_arrays
from attncore.kernels import host_functions
from attncore.quoted import quoted
from attncore.show import counted

_MOST_SLICES = 1 << 16  # by tokens: two numbers may ask for 2**31, which take minutes and all memory


class BatchSlice(NamedTuple):
    """Rows ``req_start:req_stop`` and tokens ``token_start:token_stop`` of a batch.

    The first and the last request may be cut: their other tokens are in the neighbouring slices.
    """

    req_start: int
    req_stop: int
    token_start: int
    token_stop: int


def slice_by_requests(query_lens: npt.ArrayLike, num_slices: int) -> tuple[BatchSlice, ...]:
    """``num_slices`` slices of a batch of ``query_lens`` int[n], as equal as possible in requests, none of them cut."""
    num_slices = arguments.integer("num_slices", num_slices, 1)
    lens = array_arguments.lengths("query_lens", query_lens, 0)
    if num_slices > len(lens):
        raise ValueError(
            f"num_slices: {counted(num_slices, 'slice')} of {counted(len(lens), 'request')}; ask for at most one a "
            "request"
        )
    starts = host_functions.build_query_start_loc(lens)
    bounds = [len(lens) * index // num_slices for index in range(num_slices + 1)]
    tokens = starts[bounds].tolist()
    return tuple(BatchSlice(*bounds[i : i + 2], *tokens[i : i + 2]) for i in range(num_slices))


def slice_by_tokens(query_lens: npt.ArrayLike, num_slices: int) -> tuple[BatchSlice, ...]:
    """``num_slices`` slices of a batch of ``query_lens`` int[n], as equal as possible in tokens.

    A request that lies across a border is cut: its later part has the earlier one as context, so that the slices must
    run in order, layer by layer. Rows without tokens go with the tokens before them, or with the first slice. At most
    2**16 slices.
    """
    num_slices = arguments.integer("num_slices", num_slices, 1, _MOST_SLICES)
    starts = host_functions.build_query_start_loc(array_arguments.lengths("query_lens", query_lens, 0))
    num_reqs, num_tokens = len(starts) - 1, int(starts[-1])
    if num_slices > num_tokens:
        raise ValueError(
            f"num_slices: {counted(num_slices, 'slice')} of {counted(num_tokens, 'token')}; ask for at most one a token"
        )
    slices: list[BatchSlice] = []
    req_start = token_start = 0
    for index in range(1, num_slices + 1):
        token_stop = num_tokens * index // num_slices
        # Rows that begin before the border, and rows without tokens that begin at it.
        req_stop = int(np.searchsorted(starts[:-1], token_stop, side="left"))
        while req_stop < num_reqs and starts[req_stop + 1] == token_stop:
            req_stop += 1
        slices.append(BatchSlice(req_start, req_stop, token_start, token_stop))
        token_start = token_stop
        req_start = req_stop if starts[req_stop] == token_stop else req_stop - 1
    return tuple(slices)


def slice_metadata(
    metadata: CommonAttentionMetadata, batch_slice: BatchSlice, *, block_size: int | None = None
) -> CommonAttentionMetadata:
    """The metadata of ``batch_slice`` as a batch of its own, with indices rebased to its start.

    Arrays are views of the batch's where possible, and valid as long as these. ``block_size``, in tokens, is needed
    only where the last request is cut and the batch has page lists. The encoder tokens of a cut request run in the
    earlier slice. A batch of the list builder, and that of one rank of several, can be sliced at requests only, since
    tables and lengths may be trimmed. Raises ValueError where the slice is not one of this batch, and for a step padded
    to a captured size.
    """
    check_metadata("metadata", metadata)
    if not isinstance(batch_slice, tuple) or len(batch_slice) != len(BatchSlice._fields):
        raise TypeError(f"batch_slice: {quoted(batch_slice)} is not a BatchSlice")
    batch_slice = BatchSlice(
        *(
            arguments.integer(f"batch_slice.{name}", value, 0)
            for name, value in zip(BatchSlice._fields, batch_slice, strict=True)
        )
    )
    req_start, req_stop, token_start, token_stop = batch_slice
    block_size = arguments.optional_integer("block_size", block_size, 1)
    _check_host(metadata, "query_start_loc", "query_lens", "seq_lens")
    bounds = _row_starts(metadata)
    _check_slice(metadata, batch_slice, bounds)
    before, after = int(token_start - bounds[req_start]), int(bounds[req_stop] - token_stop)
    first_decode = 0 if metadata.decodes_first else metadata.num_prefills
    first_prefill = metadata.num_decodes if metadata.decodes_first else 0
    parts = ("decode", first_decode, metadata.num_decodes), ("prefill", first_prefill, metadata.num_prefills)
    view = metadata._view(req_start, req_stop, token_start, token_stop)
    if before or after:
        _check_host(metadata, "context_lens")
        crosses = is_cross(metadata.host)
        _check_cut(metadata, crosses, *([token_start] if before else []), *([token_stop] if after else []))
        cut_encoder = int(view.host.encoder_query_lens[0]) if hasattr(view.host, "encoder_query_lens") else 0
        fewer_keys = after > 0 and not crosses
        _cut(view, before, after, block_size, fewer_keys)
        if isinstance(view, DeviceView):
            _cut_on_device(view, before, after, cut_encoder if before else 0, block_size or 1, fewer_keys)
    for part, start, count in parts:
        first, last = (min(max(row, req_start), req_stop) for row in (start, start + count))
        longest = int(view.host.seq_lens[first - req_start : last - req_start].max(initial=0))
        tokens = int(view.host.query_lens[first - req_start : last - req_start].sum())
        counts = {f"num_{part}s": last - first, f"num_{part}_tokens": tokens, f"max_{part}_seq_len": longest}
        if part == "decode" and last > first:
            counts["max_decode_query_len"] = int(view.host.query_lens[first - req_start : last - req_start].max())
        view.__dict__.update(counts)
    # Rows that are neither are padding, which runs as decodes.
    view.num_decode_tokens = view.num_tokens - view.num_prefill_tokens
    view.max_seq_len = max(view.max_decode_seq_len, view.max_prefill_seq_len)
    return view


def _check_host(metadata: CommonAttentionMetadata, *names: str) -> None:
    """ValueError where the host has not what a slice is made by: an adopted step without lengths, or fields skipped."""
    for name in names:
        if own_array(metadata.host, name) is None:
            raise ValueError(f"metadata: no {name} on the host, which slices are made by; slice a step that has them")


def _row_starts(metadata: CommonAttentionMetadata) -> npt.NDArray[np.int64]:
    """Where each row's tokens start, including the padded rows of the list builder, of one token each."""
    starts = metadata.host.query_start_loc.astype(np.int64)
    padded = metadata.num_reqs + 1 - len(starts)
    return np.concatenate((starts, starts[-1] + 1 + np.arange(padded))) if padded > 0 else starts


def _check_slice(metadata: CommonAttentionMetadata, batch_slice: BatchSlice, bounds: npt.NDArray[np.int64]) -> None:
    req_start, req_stop, token_start, token_stop = batch_slice
    if metadata.use_cuda_graph and not metadata.from_groups:
        raise ValueError("metadata: padded to a captured size; slice the step that is built without a bucket")
    if not req_start < req_stop <= metadata.num_reqs:
        raise ValueError(f"batch_slice: rows {req_start}:{req_stop} of a batch of {counted(metadata.num_reqs, 'row')}")
    starts_in, ends_in = bounds[req_start : req_start + 2], bounds[req_stop - 1 : req_stop + 1]
    first_fits = token_start == starts_in[0] or starts_in[0] < token_start < starts_in[1]
    last_fits = token_stop == ends_in[1] or ends_in[0] < token_stop < ends_in[1]
    if not first_fits or not last_fits or token_stop < token_start:
        raise ValueError(
            f"batch_slice: tokens {token_start}:{token_stop} do not begin in row {req_start} and end in row "
            f"{req_stop - 1}, whose tokens are {bounds[req_start]}:{bounds[req_stop]}; slice this step's query_lens"
        )


def _check_cut(metadata: CommonAttentionMetadata, crosses: bool, *cuts: int) -> None:
    """ValueError where requests of the step cannot be cut, or not ahead of the tokens ``cuts``."""
    if metadata.from_groups:
        raise ValueError(
            "batch_slice: cuts a request of the list builder, whose table may be trimmed; slice by requests"
        )
    if holds_trees(metadata):
        raise ValueError("batch_slice: cuts a request of a step with draft trees; slice by requests")
    ends = getattr(metadata.host, "span_ends", None)
    for cut in cuts:
        if ends is not None and ends[cut] and ends[cut] == ends[cut - 1]:
            raise ValueError(
                f"batch_slice: cuts a span ahead of token {cut}, whose tokens see each other; slice by requests, or "
                "between spans"
            )
    if metadata.of_rank or (not crosses and first_partial(metadata) >= 0):
        raise ValueError(
            "batch_slice: cuts a request of which one rank of several keeps a part; slice the whole batch's metadata, "
            "and take the rank's of each slice"
        )


def _cut(view: CommonAttentionMetadata, before: int, after: int, block_size: int | None, fewer_keys: bool) -> None:
    """Removes ``before`` tokens from the first request of a view, which become context, and ``after`` from the last,
    with their keys where these are the tokens' own (``fewer_keys``).
    """
    host: Any = view.host
    own = own_arrays(host)  # to write to, once they are copies
    has_pages = any(own_array(host, name) is not None for name in ("paged_kv_indptr", "paged_kv_last_page_len"))
    if fewer_keys and has_pages and block_size is None:
        raise ValueError("block_size: needed to slice through a request, whose page list changes")
    for name in ("query_lens", "context_lens", "seq_lens"):
        setattr(host, name, getattr(own, name).copy())
    own.query_lens[0] -= before
    own.context_lens[0] += before
    own.query_lens[-1] -= after
    if fewer_keys:
        own.seq_lens[-1] -= after
    host.query_start_loc = host_functions.build_query_start_loc(own.query_lens)
    host.seq_start_loc = host_functions.build_query_start_loc(own.seq_lens)
    host.logits_indices = own.query_start_loc[1:] - np.int32(1)
    view.max_query_len = int(own.query_lens.max(initial=0))
    if before:
        _cut_encoder(host)
    if fewer_keys and has_pages:
        _cut_pages(host, after, block_size or 1)


def _cut_encoder(host: Any) -> None:
    """Removes the encoder tokens of a view's first request, which an earlier slice runs: who sent the step may have
    skipped the lengths or the starts of these.
    """
    lengths, starts = own_array(host, "encoder_query_lens"), own_array(host, "encoder_query_start_loc")
    if lengths is None and starts is None:
        return
    lengths = np.diff(starts) if lengths is None else lengths.copy()
    if (slots := own_array(host, "cross_slot_mapping")) is not None:
        host.cross_slot_mapping = slots[lengths[0] :]
    lengths[0] = 0
    if own_array(host, "encoder_query_lens") is not None:
        host.encoder_query_lens = lengths
    if starts is not None:
        host.encoder_query_start_loc = host_functions.build_query_start_loc(lengths)


def _cut_on_device(
    view: DeviceView, before: int, after: int, cut_encoder: int, block_size: int, fewer_keys: bool
) -> None:
    """The same for the fields on a device, from their values there: host lengths of an overlapped step are bounds."""
    host: Any = view.host
    fields = {name: getattr(view, name).clone() for name in ("query_lens", "context_lens", "query_start_loc")}
    fields["query_lens"][0] -= before
    fields["query_lens"][-1] -= after
    fields["context_lens"][0] += before
    fields["query_start_loc"][1:] -= before
    fields["query_start_loc"][-1] -= after
    fields["logits_indices"] = fields["query_start_loc"][1:] - 1
    if cut_encoder:
        for name in ("encoder_query_lens", "encoder_query_start_loc"):
            fields[name] = getattr(view, name).clone()
        fields["encoder_query_lens"][0] = 0
        fields["encoder_query_start_loc"][1:] -= cut_encoder
        fields["cross_slot_mapping"] = view.cross_slot_mapping[cut_encoder:]
    if fewer_keys:
        for name in ("seq_lens", "seq_start_loc"):
            fields[name] = getattr(view, name).clone()
            fields[name][-1] -= after
        if hasattr(host, "paged_kv_indptr"):
            length = fields["seq_lens"][-1]
            pages = (length + (block_size - 1)) // block_size
            for name in ("paged_kv_indptr", "paged_kv_last_page_len"):
                fields[name] = getattr(view, name).clone()
            fields["paged_kv_indptr"][-1] = fields["paged_kv_indptr"][-2] + pages
            fields["paged_kv_last_page_len"][-1] = length - (pages - 1) * block_size
            if view.knows_pages:
                fields["paged_kv_indices"] = view.paged_kv_indices[: int(host.paged_kv_indptr[-1])]
    view.__dict__.update(fields)


def _cut_pages(host: Any, after: int, block_size: int) -> None:
    """Shortens the page lists of a view whose last request was cut by ``after`` tokens: those that were sent."""
    length = int(host.seq_lens[-1])
    if (last_page_len := own_array(host, "paged_kv_last_page_len")) is not None:
        host.paged_kv_last_page_len = last_page_len.copy()
        own_arrays(host).paged_kv_last_page_len[-1] = (length - 1) % block_size + 1
    if (indptr := own_array(host, "paged_kv_indptr")) is None:
        return
    held, whole = int(indptr[-1] - indptr[-2]), length + after
    if -(-whole // block_size) != held:
        raise ValueError(
            f"block_size: {block_size}, but the last request has {counted(whole, 'token')} in "
            f"{counted(held, 'page')}; give "
            "the block size of the step's page lists"
        )
    host.paged_kv_indptr = indptr = indptr.copy()
    indptr[-1] = indptr[-2] + (length - 1) // block_size + 1
    if (indices := own_array(host, "paged_kv_indices")) is not None:
        host.paged_kv_indices = indices[: indptr[-1]]
