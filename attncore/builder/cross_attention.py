"""Encoders and cross attention: the encoder's part of a list-door step, and what each type of attention runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from attncore.abstract import AttentionType

if TYPE_CHECKING:
    from attncore.builder.metadata import CommonAttentionMetadata

#: Fields of metadata that a step without encoder input does not have.
ENCODER_FIELDS = (
    "encoder_seq_lens", "encoder_query_lens", "encoder_seq_start_loc", "encoder_query_start_loc", "cross_slot_mapping",
    "cross_block_table",
)  # fmt: skip


def token_counts(metadata: CommonAttentionMetadata, attn_type: AttentionType | str) -> tuple[int, int, int]:
    """(query tokens of prefills, key tokens of prefills, query tokens of decodes) of attention of ``attn_type``.

    By the rules of the first generation, whose steps are all prompts or all decodes: encoder tokens count as
    ``num_encoder_tokens``, also those of decodes, of which no key runs. (``len(metadata.cross_slot_mapping)`` is what
    runs.) Raises ValueError for another type, and where the step has no encoder input but the type needs it.
    """
    try:
        kind = AttentionType(attn_type)
    except ValueError:
        raise ValueError(f"attn_type: {attn_type!r} is not one of {', '.join(AttentionType)}") from None
    prefill, decode = metadata.num_prefill_tokens, metadata.num_decode_tokens
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        return prefill, prefill, decode
    if not hasattr(metadata, "encoder_seq_lens"):
        raise ValueError(
            f"metadata: attention of type {kind} needs encoder_seq_lens, which this step, without encoder input, lacks"
        )
    encoder = metadata.num_encoder_tokens
    return (encoder, encoder, 0) if kind is AttentionType.ENCODER else (prefill, encoder, decode)


def encoder_rows(host: Any, first: int, last: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, int]]:
    """The encoder fields of rows first..last of ``host`` as a batch of their own, and their counts."""
    fields = {name: getattr(host, name)[first:last] for name in ("encoder_seq_lens", "encoder_query_lens")}
    fields["cross_block_table"] = host.cross_block_table[first:last]
    start, stop = host.encoder_query_start_loc[[first, last]].tolist()
    fields["cross_slot_mapping"] = host.cross_slot_mapping[start:stop]
    for name in ("encoder_seq_start_loc", "encoder_query_start_loc"):
        sums = getattr(host, name)[first : last + 1]
        fields[name] = sums - sums[0] if sums[0] else sums
    lens = fields["encoder_seq_lens"]
    unpadded = lens[: max(0, len(host.query_lens) - first)]  # a list-door graph pads with 1
    return fields, {"num_encoder_tokens": int(unpadded.sum()), "max_encoder_seq_len": int(lens.max(initial=0))}
