"""Whether a cross layer finds each request's encoder tokens in the row of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncore.show import counted

if TYPE_CHECKING:
    from attncore.abstract.attention_metadata import AttentionMetadata


def check_cross_rows(metadata: AttentionMetadata, num_rows: int) -> None:
    """Raise ValueError where the encoders' fields of a step have other rows than its requests, as in views of a mixed
    step of the list builder: a cross layer would attend another request's encoder tokens. ``num_rows`` are those of a
    field that the caller's spec declares, such as ``len(metadata.encoder_seq_lens)``. It waits for no device.
    """
    requests = metadata.num_reqs
    if num_rows != requests:
        raise ValueError(
            f"metadata: encoder_seq_lens has {counted(num_rows, 'row')} for {counted(requests, 'request')}; views of a "
            "mixed step of the list builder keep the whole step's encoder fields, so run such a step whole"
        )
