"""Dialects: how kernel libraries differ in the metadata that the list builder makes for them (its ``layout=``)."""

from __future__ import annotations

from typing import NamedTuple


class Dialect(NamedTuple):
    """The rules of one ``layout`` of the list builder."""

    name: str
    whole_batch_hit: bool = False
    """A prefix-cache hit in any group gives every row of the batch its whole table."""
    multi_token_decode: bool = False
    """Decodes may run several tokens (speculative decoding)."""
    cuts_lookahead: bool = False
    """Under a graph, a row wider than the table loses its lookahead blocks; otherwise it is an error."""
    page_lists: bool = False
    """Builds paged_kv_indptr, paged_kv_indices and paged_kv_last_page_len."""
    encoder_decoder: bool = True
    """Has encoder and cross attention."""


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("common"),
        Dialect("flash", whole_batch_hit=True, multi_token_decode=True, cuts_lookahead=True),
        Dialect("flashinfer", cuts_lookahead=True, page_lists=True, encoder_decoder=False),
        Dialect("rocm"),
    )
}
