"""What the list door takes: groups of sequences with lists of block ids, as first-generation engines have them."""

from __future__ import annotations

import collections.abc
from typing import Any, NamedTuple

import numpy.typing as npt


class Sequence(NamedTuple):
    """One sequence of a step. Checked when metadata is built from it, not when it is made."""

    seq_id: int
    """The engine's name for it; unique in its group."""
    query_len: int
    """Tokens of this step, at least 1."""
    context_len: int
    """Tokens already in the cache."""
    block_table: collections.abc.Sequence[int] | npt.NDArray[Any] | None
    """Its block ids (a list, tuple, int32 or int64 array; ids 0 to 2**31 - 1), or None in a profiling run."""


class SequenceGroup(NamedTuple):
    """Sequences that are all prompts, or all decodes. In a step, prompts come before decodes."""

    is_prompt: bool
    sequences: list[Sequence]
    prefix_cache_hit: bool = False
    """Whether part of a prompt's context came from the prefix cache; excludes a sliding window."""
    encoder_seq_len: int | None = None
    """Encoder tokens of each of its sequences, for a builder of encoder/decoder models; 0: no encoder input."""
    cross_block_table: collections.abc.Sequence[int] | npt.NDArray[Any] | None = None
    """The blocks that hold the encoder's keys, shared by its sequences; None where block tables are (profiling)."""
