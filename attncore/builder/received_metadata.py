"""Metadata of fields that arrived from another rank, checked as what it is: data from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attncore import arguments
from attncore.arguments import INT32_MAX
from attncore.builder import slices
from attncore.builder.checked_backend import check_backend
from attncore.builder.fields import (
    ARRAYS,
    BROADCAST,
    COUNTS,
    DERIVED,
    ENCODER_ARRAYS,
    FIELDS,
    FLAGS,
    MOST_TREE_TOKENS,
    Length,
)
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.needed_fields import check_needed_fields
from attncore.builder.rank_drafts import refuse_rank_drafts
from attncore.builder.read_only import read_only
from attncore.did_you_mean import did_you_mean
from attncore.quoted import MAX_PART, one_line, quoted
from attncore.show import counted


def metadata_from_fields(fields: Mapping[str, Any], backend: Any = None) -> CommonAttentionMetadata:
    """The inverse of ``asdict_zerocopy``: metadata from fields that arrived from another rank.

    Arrays are NumPy arrays or torch tensors; tensors on a device are copied to the host. ``backend`` wraps them for its
    device (None: NumPy). A skipped field raises AttributeError on access. Raises ValueError or TypeError that names the
    field where it is unknown or no such count, where an array's length is not that of the counts, where starts
    (``query_start_loc``, ``paged_kv_indptr``) descend or reach beyond what they count, or count other tokens of a row,
    of the decodes or of the prefills, where indices (``logits_indices``, ``token_to_req_indices``) are of no token or
    request of the step, and where masks (``tree_mask``) are of no trees or ``span_ends`` of no spans; ValueError for a
    missing count, and for a missing field that the backend's spec declares (``backend.check_metadata``), and for drafts
    on a rank.

    That block ids, slots and lengths are those of a cache and of its table is the caller's to know: no cache is known
    here. ``reference`` compares the host's with the cache that it is handed, and on a CPU the table's ids; kernels of
    other backends read where a block id leads them.
    """
    return received(fields, backend, CommonAttentionMetadata)


def received(fields: Mapping[str, Any], backend: Any, kind: type[CommonAttentionMetadata]) -> CommonAttentionMetadata:
    """``metadata_from_fields``, of class ``kind``."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields: {type(fields).__name__} found; give what asdict_zerocopy returned")
    unknown = sorted(set(fields) - ARRAYS - set(BROADCAST), key=str)
    if unknown:
        close = did_you_mean(unknown[0], (*ARRAYS, *BROADCAST))
        raise ValueError(f"fields: {quoted(unknown[0])} is no field of metadata{close}")
    missing = [name for name in COUNTS if name not in fields]
    if missing:
        raise ValueError(f"fields: {missing[0]!r} is missing; only arrays may be skipped")
    if backend is not None:
        check_backend(backend)
    host = slices.HostArrays()
    for name in ARRAYS & fields.keys():
        setattr(host, name, _on_host(name, fields[name]))
    values = {name: _count(name, fields[name]) for name in BROADCAST if name in fields}
    _check_counts(values)
    _check_lengths(host, values)
    _check_starts(host, values["num_tokens"])
    _check_rows(host, values)
    _check_indices(host, values["num_tokens"], values["num_reqs"])
    _check_trees(host)
    _check_spans(host)
    of_rank = values.pop("of_rank", False)
    metadata = kind(host, read_only if backend is None else backend.from_host, **values, _of_rank=of_rank)
    if backend is not None:
        check_needed_fields(metadata, backend)
        refuse_rank_drafts(metadata, backend)
    return metadata


def _on_host(name: str, array: Any) -> Any:
    """A tensor's copy on the host; ValueError where it has no values to copy, such as one of the device meta."""
    if not hasattr(array, "cpu"):
        return array
    try:
        return array.cpu()
    except Exception as error:  # a library's own
        where = getattr(array, "device", "no device")
        raise ValueError(
            f"fields[{name!r}]: on {where}, it cannot be copied to the host: {one_line(error, MAX_PART)}"
        ) from error


def _count(name: str, value: Any) -> int | bool:
    path = f"fields[{name!r}]"
    return arguments.flag(path, value) if name in (*FLAGS, "use_cuda_graph") else arguments.integer(path, value, 0)


def _check_counts(values: Mapping[str, int | bool]) -> None:
    """ValueError where decodes and prefills are not the requests, and their tokens the step's; padded rows are
    neither.
    """
    pairs = [("num_reqs", ("num_decodes", "num_prefills")), ("num_tokens", ("num_decode_tokens", "num_prefill_tokens"))]
    for whole, parts in pairs:
        found = sum(values[name] for name in parts)
        if found > values[whole] or (found < values[whole] and not _may_be_padded(values)):
            raise ValueError(
                f"fields[{whole!r}]: {values[whole]} found, but {' and '.join(parts)} are {found} together"
            )
    for whole, name in (("num_reqs", "num_actual_reqs"), ("num_tokens", "num_actual_tokens")):
        if values.get(name, 0) > values[whole]:
            raise ValueError(f"fields[{name!r}]: {values[name]} found, more than {whole} {values[whole]}")


def _may_be_padded(values: Mapping[str, int | bool]) -> bool:
    """Whether there may be rows of no request: of a captured size, and of slices of one of the list builder, which
    holds decodes only.
    """
    return bool(values["use_cuda_graph"] or (values.get("from_groups") and not values["num_prefills"]))


def _check_lengths(host: Any, values: Mapping[str, int | bool]) -> None:
    """ValueError where an array is not as long as a step of these counts; a view's encoder may cover more rows.

    The list builder pads some arrays of a graph's step only, and plain prompts may come without a table.
    """
    num_tokens, num_reqs, from_groups = values["num_tokens"], values["num_reqs"], values.get("from_groups")
    built = values["num_prefills"] + values["num_decodes"] if from_groups else num_reqs  # what is not padded
    for name in host.field_names():
        field = FIELDS[name]
        if name in DERIVED or field.length is Length.PAGE:
            continue
        if name in ENCODER_ARRAYS:
            _check_encoder(name, host, num_reqs)
            continue
        found = len(host.peek(name))
        if field.length is Length.TABLE:
            wanted, other = num_reqs, 0 if from_groups and _plain_prompts(host, values) else num_reqs
        else:
            wanted = field.num_elements(num_tokens, num_reqs, 0)
            other = wanted if field.list_pads else field.num_elements(num_tokens, built, 0)
        if found not in (wanted, other):
            raise ValueError(
                f"fields[{name!r}]: {found} long, but {counted(num_tokens, 'token')} and "
                f"{counted(num_reqs, 'request')} make {wanted}"
            )


def _plain_prompts(host: Any, values: Mapping[str, int | bool]) -> bool:
    """Whether no row has keys of an earlier step, which are read by the table."""
    context = host.peek("context_lens")
    return not values["num_decodes"] and context is not None and not context.any()


def _check_encoder(name: str, host: Any, num_reqs: int) -> None:
    """ValueError where an array of encoders covers fewer rows, or encoder tokens of this step, than there are."""
    field, starts, found = FIELDS[name], host.peek("encoder_query_start_loc"), len(host.peek(name))
    running = int(starts[-1]) if starts is not None and len(starts) else 0
    least = num_reqs if field.length is Length.TABLE else field.num_elements(0, num_reqs, running)
    if found < least:
        raise ValueError(
            f"fields[{name!r}]: {found} long, but {counted(num_reqs, 'request')} with "
            f"{counted(running, 'encoder token')} in this step must have {least}"
        )


def _check_starts(host: Any, num_tokens: int) -> None:
    """ValueError where an array of starts descends, or ends beyond the tokens or page indices that there are."""
    ends, pages = {"query_start_loc": ("tokens", num_tokens)}, host.peek("paged_kv_indices")
    if pages is not None:  # the page indices were not skipped
        ends["paged_kv_indptr"] = "paged_kv_indices", len(pages)
    for name in host.field_names():
        if FIELDS[name].length is not Length.START or name in DERIVED:
            continue
        starts = host.peek(name)
        if starts[0] or (starts[1:] < starts[:-1]).any():
            raise ValueError(
                f"fields[{name!r}]: {quoted(starts.tolist())} found; starts begin with 0 and never descend"
            )
        what, end = ends.get(name, ("", INT32_MAX))
        if starts[-1] > end:
            raise ValueError(f"fields[{name!r}]: it ends with {starts[-1]}, but there are {end} {what}")


def _check_rows(host: Any, values: Mapping[str, int | bool]) -> None:
    """ValueError where ``query_start_loc`` counts other tokens of a row, of the decodes or of the prefills."""
    starts, lengths = host.peek("query_start_loc"), host.peek("query_lens")
    if starts is None:
        return
    if lengths is not None and not np.array_equal(np.diff(starts), lengths):
        raise ValueError(
            f"fields['query_lens']: {quoted(lengths.tolist())} found beside query_start_loc {quoted(starts.tolist())}"
        )
    first, last = ("decode", "prefill") if values.get("decodes_first") else ("prefill", "decode")
    border = int(starts[values[f"num_{first}s"] if values[f"num_{last}s"] else -1])
    for kind, found in ((first, border), (last, int(starts[-1]) - border)):
        tokens = values[f"num_{kind}_tokens"]
        if found > tokens or (found < tokens and not _may_be_padded(values)):
            raise ValueError(f"fields['num_{kind}_tokens']: {tokens} found, but query_start_loc counts {found}")


def _check_indices(host: Any, num_tokens: int, num_reqs: int) -> None:
    """ValueError where an index is of no token, or no request, of the step. A request that has no token at the step's
    start has its last one before the first.
    """
    for name, least, count, what in (
        ("logits_indices", -1, num_tokens, "tokens"),
        ("token_to_req_indices", 0, max(num_reqs, 1), "requests"),
    ):
        found = host.peek(name)
        if found is None:
            continue
        wrong = found[(found < least) | (found >= count)]
        if len(wrong):
            raise ValueError(f"fields[{name!r}]: {wrong[0]} found, but there are {count} {what}")


def _check_trees(host: Any) -> None:
    """ValueError where the mask of a token has not the token itself as its last and the root as its first, or other
    tokens of its request have none.
    """
    masks, starts = host.peek("tree_mask"), host.peek("query_start_loc")
    if masks is None or starts is None or not masks.any():
        return
    tokens = np.arange(len(masks))
    first = starts[np.searchsorted(starts, tokens, side="right") - 1].astype(np.int64)
    bits, own = np.asarray(masks).view(np.uint64), tokens - first
    last = bits >> np.minimum(own, 63).astype(np.uint64)
    fits = (own < MOST_TREE_TOKENS) & (last == 1) & (bits & np.uint64(1) == 1)
    wrong = np.flatnonzero(np.where(masks[np.minimum(first, len(masks) - 1)] != 0, ~fits, bits != 0))
    if len(wrong):
        raise ValueError(
            f"fields['tree_mask']: {masks[wrong[0]]} of token {wrong[0]}, which is {own[wrong[0]]} of its request; a "
            "draft tree's tokens have a bit for the root, some before them and themselves, all other requests' 0"
        )


def _check_spans(host: Any) -> None:
    """ValueError where the end of a token's span is not behind it, or the tokens up to there have not the same end."""
    ends, starts, contexts = (host.peek(name) for name in ("span_ends", "query_start_loc", "context_lens"))
    if ends is None or starts is None or contexts is None or not ends.any():
        return
    tokens, count = np.arange(len(ends)), len(contexts)
    rows = np.clip(np.searchsorted(starts, tokens, side="right") - 1, 0, count)
    inside = rows < count  # a padded token is in no request
    starts, contexts = np.append(starts, starts[-1]), np.append(contexts, 0)
    left = ends.astype(np.int64) - (contexts[rows] + tokens - starts[rows]) - 1  # tokens of the span behind this one
    following = np.minimum(tokens + 1, len(ends) - 1)
    same = (tokens + 1 < starts[rows + 1]) & (ends[following] == ends)
    if (masks := host.peek("tree_mask")) is not None:
        inside &= masks == 0
    wrong = np.flatnonzero((ends != 0) & ~(inside & ((left == 0) | ((left > 0) & same))))
    if len(wrong):
        raise ValueError(
            f"fields['span_ends']: {ends[wrong[0]]} of token {wrong[0]}; it is the position behind the last token of a "
            "span, which all of its tokens have, and 0 of tokens in none and in draft trees"
        )
