"""The fields of a step by the keyword arguments that metadata of the first generation is made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import array_arguments
from attncore.arguments import flag, integer, integer_or_none
from attncore.array_arguments import Int32Array
from attncore.did_you_mean import did_you_mean
from attncore.quoted import quoted
from attncore.show import counted

_SETTINGS = frozenset(
    (
        "multi_modal_placeholder_index_maps", "enable_kv_scales_calculation", "block_table_bound", "is_profile_run",
        "prefill_wrapper", "decode_wrapper", "num_qo_heads", "num_kv_heads", "head_dim", "page_size", "data_type",
        "q_data_type", "device", "window_left", "logits_soft_cap", "sm_scale",
    )
)  # fmt: skip
"""What is no field of ours: settings of layers and of their cache, and what follows from the fields."""

_COUNTS = ("num_prefills", "num_prefill_tokens", "num_decode_tokens")
_MAXIMA = ("max_query_len", "max_prefill_seq_len", "max_decode_seq_len", "max_decode_query_len", "decode_query_len")
_PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_ENCODER = (
    "encoder_seq_lens", "encoder_seq_lens_tensor", "encoder_seq_start_loc", "max_encoder_seq_len",
    "num_encoder_tokens", "cross_slot_mapping", "cross_block_tables",
)  # fmt: skip
NAMES = frozenset(
    (
        *_SETTINGS, *_COUNTS, *_MAXIMA, *_PAGES, *_ENCODER, "slot_mapping", "seq_lens", "seq_lens_tensor",
        "context_lens_tensor", "query_start_loc", "seq_start_loc", "block_tables", "use_cuda_graph",
    )
)  # fmt: skip
"""Every keyword argument that is taken."""


def fields_of_first_generation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for ``metadata_from_fields`` of the keyword arguments of the first generation.

    ``slot_mapping``, ``block_tables``, the three counts and ``seq_lens`` or ``seq_lens_tensor`` are required; None
    counts as missing. The rest is derived where it is missing: lengths of queries and contexts, for a step without
    ``query_start_loc``, where every row is a decode of one token or a whole prompt. Raises TypeError for a missing or
    unknown name, and ValueError that names the argument where lengths and counts disagree.
    """
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{name}: no field of a step{did_you_mean(name, NAMES)}")
    values = {name: _on_host(name, value) for name, value in given.items() if value is not None}
    values |= {name: flag(name, values.get(name, False)) for name in ("use_cuda_graph", "is_profile_run")}
    for name in (*_COUNTS, "slot_mapping", "block_tables"):
        if name not in values:
            raise TypeError(f"{name}: missing; a step has {', '.join(_COUNTS)}, slot_mapping and block_tables")
    counts = {name: integer(name, values[name], 0) for name in _COUNTS}
    fields = _rows(values, counts) | {"slot_mapping": values["slot_mapping"], "block_table": values["block_tables"]}
    fields |= _maxima(values, fields) | {"num_encoder_tokens": 0, "max_encoder_seq_len": 0}
    if any(name in values for name in _PAGES):
        fields |= _pages(values, fields["num_reqs"])
    if "encoder_seq_lens" in values or "encoder_seq_lens_tensor" in values:
        fields |= _encoder(values, fields)
    return fields | {"decodes_first": False, "from_groups": True}


def _on_host(name: str, value: Any) -> Any:
    return value.cpu() if name not in _SETTINGS and hasattr(value, "cpu") else value


def _lengths(values: Mapping[str, Any], name: str) -> Int32Array:
    """The lengths that are given as a list by ``name`` and as a tensor by ``name_tensor``, or by one of the two."""
    both = [values[each] for each in (f"{name}_tensor", name) if each in values]
    if not both:
        raise TypeError(f"{name}_tensor: missing; give it, or {name}")
    first, *other = (array_arguments.lengths(name, each, 0) for each in both)
    if other and not np.array_equal(first, other[0]):
        raise ValueError(f"{name}: {quoted(other[0].tolist())} found, but {name}_tensor has {quoted(first.tolist())}")
    return first


def _starts(lens: Int32Array, name: str = "query_start_loc") -> Int32Array:
    starts = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    return array_arguments.lengths(name, starts, 0)


def _given_starts(values: Mapping[str, Any], name: str, lens: Int32Array) -> Int32Array:
    """The sums of ``lens``; ValueError where others are given by ``name``."""
    starts = _starts(lens, name)
    if name in values:
        found = array_arguments.lengths(name, values[name], 0)
        if not np.array_equal(found, starts):
            raise ValueError(f"{name}: {quoted(found.tolist())} found; the lengths add up to {quoted(starts.tolist())}")
    return starts


def _differences(starts: Any) -> Int32Array:
    """The query lengths between ``starts``; ValueError where these descend, or do not begin with 0."""
    found = array_arguments.lengths("query_start_loc", starts, 0)
    if not len(found) or found[0] or (found[1:] < found[:-1]).any():
        raise ValueError(f"query_start_loc: {quoted(found.tolist())} found; starts begin with 0 and never descend")
    return np.diff(found)


def _rows(values: Mapping[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    """Lengths, starts and the arrays of tokens, and the counts of rows."""
    lens = _lengths(values, "seq_lens")
    num_reqs, num_tokens = len(lens), counts["num_prefill_tokens"] + counts["num_decode_tokens"]
    given = values.get("query_start_loc")
    queries = _queries(lens, counts) if given is None else _differences(given)
    starts = _starts(queries)
    pad = num_reqs - len(queries)
    if not 0 <= pad <= (num_reqs if values["use_cuda_graph"] else 0):
        raise ValueError(
            f"query_start_loc: {counted(len(starts), 'start')} found; {counted(num_reqs, 'row')} must have "
            f"{num_reqs + 1}"
        )
    if counts["num_prefills"] > len(queries):
        raise ValueError(f"num_prefills: {counts['num_prefills']} found, but there are {counted(len(queries), 'row')}")
    if int(starts[-1]) + pad != num_tokens:
        raise ValueError(
            f"query_start_loc: it ends with {starts[-1]}, with {counted(pad, 'padded row')} behind, but "
            f"num_prefill_tokens and num_decode_tokens are {num_tokens} together"
        )
    _check_prefill_tokens(counts, starts)
    contexts = _contexts(values, counts, lens, queries)
    rows = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    tokens = np.arange(len(rows), dtype=np.int64) - starts.take(rows) + contexts.take(rows)
    return counts | {
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "num_decodes": len(queries) - counts["num_prefills"],
        "use_cuda_graph": values["use_cuda_graph"],
        "seq_lens": lens,
        "context_lens": contexts,
        "query_lens": queries,
        "query_start_loc": starts,
        "seq_start_loc": _given_starts(values, "seq_start_loc", lens),
        "logits_indices": starts[1:] - np.int32(1),
        "positions": np.concatenate([tokens, np.zeros(pad, np.int64)]),
        "token_to_req_indices": np.concatenate([rows, np.arange(len(queries), num_reqs, dtype=np.int32)]),
    }


def _queries(lens: Int32Array, counts: dict[str, int]) -> Int32Array:
    """The query lengths of a step that does not say them: decodes of one token, or whole prompts."""
    if not counts["num_prefills"] and counts["num_decode_tokens"] == len(lens):
        return np.ones(len(lens), np.int32)
    if counts["num_prefills"] == len(lens) and counts["num_prefill_tokens"] == lens.sum(dtype=np.int64):
        return lens
    raise TypeError("query_start_loc: missing; it says how many tokens each row runs")


def _check_prefill_tokens(counts: dict[str, int], starts: Int32Array) -> None:
    """ValueError unless prompts, which come first, run as many tokens as are said; decodes run those that are left."""
    prefills, tokens = counts["num_prefills"], counts["num_prefill_tokens"]
    if starts[prefills] != tokens:
        raise ValueError(
            f"num_prefill_tokens: {tokens} found, but query_start_loc[num_prefills {prefills}] is "
            f"{starts[prefills]}; prompts come before decodes"
        )


def _contexts(values: Mapping[str, Any], counts: dict[str, int], lens: Int32Array, queries: Int32Array) -> Int32Array:
    """Context lengths, as given, or of page lists, or of ``lens``; ValueError where they do not fit ``lens``.

    A row ends after its context and its query. Under a sliding window the length of a decode is below that, for its
    table has the last blocks only; that of a prompt never is.
    """
    name = "context_lens_tensor"
    if name in values:
        found = array_arguments.lengths(name, values[name], 0)
        array_arguments.same_length(name, found, len(queries))
        ends = found.astype(np.int64) + queries
    else:
        paged = _ends_of_pages(values, len(lens))
        name, ends = ("seq_lens", lens.astype(np.int64)) if paged is None else (_PAGES[0], paged)
        ends = ends[: len(queries)]
        found = array_arguments.lengths(f"{name}, less the tokens of this step", ends - queries, 0)
    decodes = np.arange(len(queries)) >= counts["num_prefills"]
    may_be_less = decodes & (integer_or_none(values.get("window_left")) != -1)
    wrong = np.flatnonzero((lens[: len(queries)] > ends) | (~may_be_less & (lens[: len(queries)] != ends)))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{name}: row {row} ends after {counted(ends[row], 'token')}, {queries[row]} of them of this step, but "
            f"its length in seq_lens is {lens[row]}"
        )
    return found


def _ends_of_pages(values: Mapping[str, Any], num_reqs: int) -> npt.NDArray[np.int64] | None:
    """How many tokens the page lists of each row hold; a step of layout ``flashinfer`` has no contexts beside them."""
    if "page_size" not in values or not any(name in values for name in _PAGES) or values["is_profile_run"]:
        return None
    page_size, lists = integer("page_size", values["page_size"], 1), _pages(values, num_reqs)
    pages = np.diff(lists[_PAGES[0]].astype(np.int64))
    return np.where(pages > 0, (pages - 1) * page_size + lists[_PAGES[2]], 0)


def _maximum(values: Mapping[str, Any], name: str, least: Any) -> int:
    """The maximum, ``least`` unless it is given; ValueError where what is given is below that."""
    found = integer(name, values.get(name, least), 0)
    if found < least:
        raise ValueError(f"{name}: {found} found, but there is a row of {least}")
    return found


def _maxima(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, int]:
    """The maxima, as given or of the lengths; ``decode_query_len`` is another name of ``max_decode_query_len``."""
    first, lens, queries = fields["num_prefills"], fields["seq_lens"], fields["query_lens"]
    found = {
        "max_query_len": queries.max(initial=0),
        "max_prefill_seq_len": lens[:first].max(initial=0),
        "max_decode_seq_len": lens[first : len(queries)].max(initial=0),
    }
    maxima = {name: _maximum(values, name, own) for name, own in found.items()}
    decode = [name for name in ("max_decode_query_len", "decode_query_len") if name in values]
    longest = queries[first:].max(initial=0)
    name = decode[0] if decode else "max_decode_query_len"
    maxima["max_decode_query_len"] = _maximum({name: max(longest, 1)} | dict(values), name, longest)
    return maxima | {"max_seq_len": max(maxima["max_prefill_seq_len"], maxima["max_decode_seq_len"])}


def _pages(values: Mapping[str, Any], num_reqs: int) -> dict[str, Any]:
    """Page lists, without the zeros behind the last page; a profiling run has rows without an entry, at the end.

    TypeError where one of the three is missing, ValueError where they do not fit one another or the rows.
    """
    for name in _PAGES:
        if name not in values:
            raise TypeError(f"{name}: missing; page lists are {', '.join(_PAGES)}")
    indptr, indices, last = (array_arguments.lengths(name, values[name], 0) for name in _PAGES)
    missing = num_reqs + 1 - len(indptr)
    if missing > 0 and len(indptr) and values["is_profile_run"]:
        indptr = np.concatenate([indptr, np.repeat(indptr[-1:], missing)])
        last = np.concatenate([last, np.zeros(missing, np.int32)])
    if len(indptr) != num_reqs + 1 or indptr[0] or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(
            f"{_PAGES[0]}: {quoted(indptr.tolist())} found; {counted(num_reqs, 'row')} must have {num_reqs + 1} "
            "starts, which begin with 0 and never descend"
        )
    array_arguments.same_length(_PAGES[2], last, num_reqs)
    if indptr[-1] > len(indices):
        raise ValueError(f"{_PAGES[1]}: {counted(len(indices), 'page')} found, but {_PAGES[0]} ends with {indptr[-1]}")
    return {_PAGES[0]: indptr, _PAGES[1]: indices[: indptr[-1]], _PAGES[2]: last}


def _encoder(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of encoders: prompts run all their encoder tokens, decodes none."""
    lens = _lengths(values, "encoder_seq_lens")
    array_arguments.same_length("encoder_seq_lens", lens, fields["num_reqs"])
    queries = np.where(np.arange(len(lens)) < fields["num_prefills"], lens, np.int32(0))
    made = {
        "encoder_seq_lens": lens,
        "encoder_query_lens": queries,
        "encoder_seq_start_loc": _given_starts(values, "encoder_seq_start_loc", lens),
        "encoder_query_start_loc": _starts(queries),
        "max_encoder_seq_len": _maximum(values, "max_encoder_seq_len", lens.max(initial=0)),
        "num_encoder_tokens": values.get(
            "num_encoder_tokens", int(lens[: len(fields["query_lens"])].sum(dtype=np.int64))
        ),
    }
    for theirs, ours in (("cross_slot_mapping", "cross_slot_mapping"), ("cross_block_tables", "cross_block_table")):
        if theirs in values:
            made[ours] = values[theirs]
    return made
