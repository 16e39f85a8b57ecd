"""The fields of a step by the keyword arguments that metadata of the first generation is made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attncore import array_arguments
from attncore.arguments import integer
from attncore.array_arguments import Int32Array
from attncore.did_you_mean import did_you_mean
from attncore.quoted import quoted

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
    for name in (*_COUNTS, "slot_mapping", "block_tables"):
        if name not in values:
            raise TypeError(f"{name}: missing; a step has {', '.join(_COUNTS)}, slot_mapping and block_tables")
    counts = {name: integer(name, values[name], 0) for name in _COUNTS}
    fields = _rows(values, counts) | {"slot_mapping": values["slot_mapping"], "block_table": values["block_tables"]}
    fields |= _maxima(values, fields) | {"num_encoder_tokens": 0, "max_encoder_seq_len": 0}
    if "paged_kv_indptr" in values:
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


def _starts(lens: Int32Array) -> Int32Array:
    starts = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=starts[1:])
    return array_arguments.lengths("query_start_loc", starts, 0)


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
    if not 0 <= pad <= (num_reqs if values.get("use_cuda_graph") else 0):
        raise ValueError(f"query_start_loc: {len(starts)} starts found; {num_reqs} rows have {num_reqs + 1}")
    if counts["num_prefills"] > len(queries):
        raise ValueError(f"num_prefills: {counts['num_prefills']} found, but there are {len(queries)} rows")
    if int(starts[-1]) + pad != num_tokens:
        raise ValueError(
            f"query_start_loc: it ends with {starts[-1]}, and {pad} rows are padded, but num_prefill_tokens and "
            f"num_decode_tokens are {num_tokens} together"
        )
    contexts = values.get("context_lens_tensor")
    contexts = _true_lengths(values, lens)[: len(queries)] - queries if contexts is None else contexts
    contexts = array_arguments.lengths("context_lens_tensor", contexts, 0)
    array_arguments.same_length("context_lens_tensor", contexts, len(queries))
    rows = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    tokens = np.arange(len(rows), dtype=np.int64) - starts[rows] + contexts[rows]
    return counts | {
        "num_reqs": num_reqs,
        "num_tokens": num_tokens,
        "num_decodes": len(queries) - counts["num_prefills"],
        "use_cuda_graph": bool(values.get("use_cuda_graph", False)),
        "seq_lens": lens,
        "context_lens": contexts,
        "query_lens": queries,
        "query_start_loc": starts,
        "seq_start_loc": values.get("seq_start_loc", _starts(lens)),
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


def _true_lengths(values: Mapping[str, Any], lens: Int32Array) -> Int32Array:
    """``lens``, or what page lists hold: a step of layout ``flashinfer`` has no contexts, and caps windowed lengths."""
    if "page_size" not in values or "paged_kv_indptr" not in values or values.get("is_profile_run"):
        return lens
    pages, page_size = np.diff(values["paged_kv_indptr"]), integer("page_size", values["page_size"], 1)
    return np.where(pages > 0, (pages - 1) * page_size + np.asarray(values["paged_kv_last_page_len"]), 0)


def _maxima(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, int]:
    """The maxima, as given or of the lengths; ``decode_query_len`` is another name of ``max_decode_query_len``."""
    first, lens, queries = fields["num_prefills"], fields["seq_lens"], fields["query_lens"]
    found = {
        "max_query_len": queries.max(initial=0),
        "max_prefill_seq_len": lens[:first].max(initial=0),
        "max_decode_seq_len": lens[first : len(queries)].max(initial=0),
        "max_decode_query_len": values.get("decode_query_len", queries[first:].max(initial=1)),
    }
    maxima = {name: integer(name, values.get(name, own), 0) for name, own in found.items()}
    return maxima | {"max_seq_len": max(maxima["max_prefill_seq_len"], maxima["max_decode_seq_len"])}


def _pages(values: Mapping[str, Any], num_reqs: int) -> dict[str, Any]:
    """Page lists, without the zeros behind the last page; a profiling run has rows without an entry, at the end."""
    indptr, last = (array_arguments.lengths(name, values.get(name, ()), 0) for name in (_PAGES[0], _PAGES[2]))
    missing = num_reqs + 1 - len(indptr)
    if missing > 0 and len(indptr) and values.get("is_profile_run"):
        indptr = np.concatenate([indptr, np.repeat(indptr[-1:], missing)])
        last = np.concatenate([last, np.zeros(missing, np.int32)])
    indices = np.asarray(values.get("paged_kv_indices", ()))
    return {_PAGES[0]: indptr, _PAGES[1]: indices[: max(indptr[-1:], default=0)], _PAGES[2]: last}


def _encoder(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of encoders: prompts run all their encoder tokens, decodes none."""
    lens = _lengths(values, "encoder_seq_lens")
    array_arguments.same_length("encoder_seq_lens", lens, fields["num_reqs"])
    queries = np.where(np.arange(len(lens)) < fields["num_prefills"], lens, np.int32(0))
    made = {
        "encoder_seq_lens": lens,
        "encoder_query_lens": queries,
        "encoder_seq_start_loc": values.get("encoder_seq_start_loc", _starts(lens)),
        "encoder_query_start_loc": _starts(queries),
        "max_encoder_seq_len": values.get("max_encoder_seq_len", int(lens.max(initial=0))),
        "num_encoder_tokens": values.get(
            "num_encoder_tokens", int(lens[: len(fields["query_lens"])].sum(dtype=np.int64))
        ),
    }
    for theirs, ours in (("cross_slot_mapping", "cross_slot_mapping"), ("cross_block_tables", "cross_block_table")):
        if theirs in values:
            made[ours] = values[theirs]
    return made
