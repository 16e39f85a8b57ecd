"""The two doors: a persistent batch built step by step, and groups of sequences handed over one step at a time."""

from attncore.builder.builder import MetadataBuilder
from attncore.builder.common import CommonMetadataBuilder
from attncore.builder.input_batch import InputBatch
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.sequence_group import Sequence, SequenceGroup

__all__ = [
    "CommonAttentionMetadata",
    "CommonMetadataBuilder",
    "InputBatch",
    "MetadataBuilder",
    "Sequence",
    "SequenceGroup",
]
