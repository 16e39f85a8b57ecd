"""The input of the list builder: groups of sequences with lists of block ids, as in first-generation engines."""

from __future__ import annotations

import collections.abc
from typing import Any, NamedTuple

import numpy.typing as npt

from attncore.builder.blocks.placeholder_map import Placeholder


class Sequence(NamedTuple):
    """One sequence of a step. It is checked when metadata is built from it, not at construction."""

    seq_id: int
    """The engine's number for the sequence, unique in its group."""
    query_len: int
    """Tokens of this step, at least 1."""
    context_len: int
    """Tokens that are in the cache already, at least 0."""
    block_table: collections.abc.Sequence[int] | npt.NDArray[Any] | None
    """Block ids (a list, tuple, int32 or int64 array on the host; ids 0 to 2**31 - 1), or None in a profiling run. Long
    tables are read fastest as int32 arrays."""


class SequenceGroup(NamedTuple):
    """Sequences that are all prompts or all decodes. In a step, prompts come before decodes."""

    is_prompt: bool
    sequences: list[Sequence]
    prefix_cache_hit: bool = False
    """Whether part of a prompt's context came from the prefix cache; excludes a sliding window."""
    encoder_seq_len: int | None = None
    """Encoder tokens of each sequence, for a builder with ``encoder_decoder``; 0: no encoder input."""
    cross_block_table: collections.abc.Sequence[int] | npt.NDArray[Any] | None = None
    """The blocks of the encoder's keys and values, shared by the sequences; None in a profiling run."""
    placeholders: collections.abc.Mapping[str, collections.abc.Sequence[Placeholder]] | None = None
    """Modality (``image``, ``audio``, ...) -> which tokens of the whole prompt take embeddings of its items, shared by
    the sequences. ``metadata.placeholder_maps`` has those of the step."""
