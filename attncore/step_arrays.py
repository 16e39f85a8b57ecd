"""StepArrays: the arrays of a step as typed attributes, each with its dtype, length and meaning.

``attncore.builder.fields.FIELDS`` says how each is laid out, padded and sliced. A new field is an entry there and an
attribute here; metadata, its ``host`` and the contract's protocols take it from both.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

Int64s = TypeVar("Int64s")
Int32s = TypeVar("Int32s")


DECLARED: Any = None
"""For type checkers, to which an attribute of a protocol without a value is abstract, in its implementation too."""


class StepArrays(Protocol[Int64s, Int32s]):
    """The arrays of a step of T tokens and n requests, padded ones included.

    ``Int64s`` and ``Int32s`` are tensors on the backend's device, or NumPy arrays on the host. A field that the builder
    does not make in this step is an AttributeError.
    """

    # one per token
    slot_mapping: Int64s = DECLARED
    """int64[T]: the slot of the token's key and value, block * block_size + offset; -1: they are not written."""
    positions: Int64s = DECLARED
    """int64[T]: the index of the token in its request; of a draft tree's, the tokens before it on its path."""
    token_to_req_indices: Int32s = DECLARED
    """int32[T]: the row of the token's request."""
    tree_mask: Int64s = DECLARED
    """int64[T]: bit j is set where the token sees the j-th token of its request in this step, of which it is one or
    descends from it in a draft tree; 0 of a token in no tree, which sees all before it."""
    span_ends: Int32s = DECLARED
    """int32[T]: the position behind the last token of the span that the token is in, all of which it sees; 0 of a token
    in no span, which sees none after it. None where no token of the step is in a span."""
    # one per request
    seq_lens: Int32s = DECLARED
    """int32[n]: tokens of context and query together (list builder: capped for windowed decodes)."""
    context_lens: Int32s = DECLARED
    """int32[n]: tokens that were in the cache before this step."""
    query_lens: Int32s = DECLARED
    """int32[n]: tokens of this step."""
    logits_indices: Int32s = DECLARED
    """int32[n]: the index among the T tokens of the request's last token."""
    query_start_loc: Int32s = DECLARED
    """int32[n + 1]: where the request's tokens start among the T tokens: prefix sums of query_lens."""
    seq_start_loc: Int32s = DECLARED
    """int32[n + 1]: prefix sums of seq_lens."""
    block_table: Int32s = DECLARED
    """int32[n, width]: the request's block ids, padded with 0. Persistent builder: the live table, of fixed stride."""
    paged_kv_indptr: Int32s = DECLARED
    """int32[n + 1]: where the request's pages start in paged_kv_indices."""
    paged_kv_indices: Int32s = DECLARED
    """int32[P]: the block ids of each request in turn; P is ``paged_kv_indptr[-1]``."""
    paged_kv_num_pages: Int32s = DECLARED
    """int32[n]: the number of the request's pages; derived from ``paged_kv_indptr`` on access."""
    paged_kv_last_page_len: Int32s = DECLARED
    """int32[n]: tokens in the request's last page; 0 for an empty request."""
    # encoders and cross attention; E is the number of encoder tokens that run in this step, row after row
    encoder_seq_lens: Int32s = DECLARED
    """int32[n]: encoder tokens of the request, 0 without encoder input. (List builder: padded with 1.)"""
    encoder_query_lens: Int32s = DECLARED
    """int32[n]: encoder tokens that run in this step. List builder: all of a prompt's, none of a decode's."""
    encoder_seq_start_loc: Int32s = DECLARED
    """int32[n + 1]: prefix sums of encoder_seq_lens."""
    encoder_query_start_loc: Int32s = DECLARED
    """int32[n + 1]: where the request's encoder tokens start among the E tokens."""
    cross_slot_mapping: Int64s = DECLARED
    """int64[E]: the slot of the encoder token's key and value in the cross cache; -1: they are not written."""
    cross_block_table: Int32s = DECLARED
    """int32[n, width]: the blocks of the request's encoder tokens, padded with 0 (list builder: for decodes only)."""


FIELD_NAMES = frozenset(StepArrays.__annotations__)
"""The names of a step's arrays, for what must not load NumPy."""
OF_LENGTHS = frozenset(
    (
        "seq_lens", "context_lens", "seq_start_loc", "positions", "paged_kv_indptr", "paged_kv_indices",
        "paged_kv_num_pages", "paged_kv_last_page_len",
    )
)  # fmt: skip
"""Those that a host has right only where it knows the lengths of requests, or bounds of them."""
