"""What attention of a type reads of a step, by the names and rules of the first generation's backends."""

from __future__ import annotations

from typing import Any

from attncore import arguments
from attncore.builder.metadata import CommonAttentionMetadata, check_metadata
from attncore.quoted import quoted
from attncore.vocabulary import AttentionType


def is_all_encoder_attn_metadata_set(metadata: CommonAttentionMetadata) -> bool:
    """Whether the step has the fields of attention in an encoder."""
    check_metadata("metadata", metadata)
    return metadata.is_all_encoder_attn_metadata_set


def is_all_cross_attn_metadata_set(metadata: CommonAttentionMetadata) -> bool:
    """Whether the step has the fields of cross attention too: those of encoders, slots and a table."""
    check_metadata("metadata", metadata)
    return metadata.is_all_cross_attn_metadata_set


def get_seq_len_block_table_args(
    metadata: CommonAttentionMetadata, is_prompt: bool, attn_type: AttentionType | str
) -> tuple[Any, int, Any]:
    """(lengths int32[n] of the keys, the longest, block table int32[n, width]) for attention of ``attn_type``.

    Arrays are where the metadata's are. Decoder layers read the step's own lengths, of which ``is_prompt`` chooses the
    maximum; the others read those of the encoder's tokens, in an encoder without a table (None). Raises ValueError for
    ``encoder_only``, which has neither, for an unknown type, and where the step lacks the encoder input.
    """
    check_metadata("metadata", metadata)
    is_prompt = arguments.flag("is_prompt", is_prompt)
    try:
        attention_type = AttentionType(attn_type)
    except ValueError:
        raise ValueError(f"attn_type: {quoted(attn_type)} is not one of {', '.join(AttentionType)}") from None
    if attention_type is AttentionType.DECODER:
        longest = metadata.max_prefill_seq_len if is_prompt else metadata.max_decode_seq_len
        return metadata.seq_lens, longest, metadata.block_table
    if attention_type is AttentionType.ENCODER_ONLY:
        raise ValueError("attn_type: encoder_only found, whose layers read no cache; give one of the others")
    cross = attention_type is AttentionType.ENCODER_DECODER
    has = metadata.is_all_cross_attn_metadata_set if cross else metadata.is_all_encoder_attn_metadata_set
    if not has:
        raise ValueError(
            f"metadata: attention of type {attention_type} needs encoder_seq_lens"
            f"{', cross_slot_mapping and cross_block_table' if cross else ''}, which this step lacks; build it with "
            "encoder_decoder=True"
        )
    return metadata.encoder_seq_lens, metadata.max_encoder_seq_len, metadata.cross_block_table if cross else None
