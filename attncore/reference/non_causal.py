"""Attention that is not causal: encoders over their own tokens, and decoder queries over an encoder's (cross)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attncore.ops.cross_rows import check_cross_rows
from attncore.reference.causal import Answer, Paged, over_keys
from attncore.show import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncore.abstract import AttentionMetadata
    from attncore.reference.scoring import Scoring


def among_themselves(step: Paged, scoring: Scoring, answer: Answer, starts: NDArray[np.int64]) -> None:
    """Attention of the tokens of each row over all of that row; ``starts`` int64 (rows + 1,) says where rows begin."""
    for start, end in pairwise(starts.tolist()):
        if start < end:
            over_keys(step, scoring, answer, slice(start, end), step.fresh(start, end))


class CrossRows(NamedTuple):
    """The requests of a step that have query tokens in it, int64 each."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Encoder tokens of the request."""
    fresh_starts: NDArray[np.int64]
    """Where they begin among this step's keys."""
    cached: NDArray[np.bool_]
    """Whether they lie in the cache, none of them being among this step's keys."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> CrossRows:
        """From the metadata's host arrays; ValueError where they do not go together."""
        host = metadata.host
        bounds, lengths, fresh, fresh_starts = (
            np.asarray(getattr(host, name), dtype=np.int64)
            for name in ("query_start_loc", "encoder_seq_lens", "encoder_query_lens", "encoder_query_start_loc")
        )
        rows = np.flatnonzero(np.diff(bounds))
        counts = {"encoder_query_lens": len(fresh), "encoder_query_start_loc less 1": len(fresh_starts) - 1}
        for name, count in counts.items():
            if count != len(lengths):
                raise ValueError(f"metadata: {name} has {counted(count, 'row')}, but encoder_seq_lens {len(lengths)}")
        check_cross_rows(metadata, len(lengths))
        if len(bounds) - 1 > len(lengths):  # fewer under a graph
            raise ValueError(
                f"metadata: query_start_loc has {counted(len(bounds) - 1, 'row')}, but encoder_seq_lens {len(lengths)}"
            )
        if len(host.cross_slot_mapping) != fresh_starts[-1]:
            raise ValueError(
                f"metadata: cross_slot_mapping has {counted(len(host.cross_slot_mapping), 'slot')} for the "
                f"{counted(fresh_starts[-1], 'encoder token')} of encoder_query_start_loc"
            )
        wrong = np.flatnonzero((lengths < 0) | ((fresh != 0) & (fresh != lengths)) | (np.diff(fresh_starts) != fresh))
        if len(wrong):
            row = wrong[0]
            raise ValueError(
                f"metadata: row {row} has encoder_seq_lens {lengths[row]}, encoder_query_lens {fresh[row]}, and "
                f"{counted(np.diff(fresh_starts)[row], 'token')} in encoder_query_start_loc; an encoder's tokens come "
                "all in one step, or none do"
            )
        cached = (lengths > 0) & (fresh == 0)
        return cls(rows, bounds[rows], bounds[rows + 1], lengths[rows], fresh_starts[rows], cached[rows])

    def reads(self, sliding_window: int | None) -> tuple[NDArray[np.int64], ...]:
        """Of the requests whose keys are in the cache: table row, and the first token that is read and the last."""
        lengths = self.lengths[self.cached]
        return self.rows[self.cached], np.zeros_like(lengths), lengths

    def attend(self, step: Paged, scoring: Scoring, answer: Answer) -> None:
        """Attention of every query over all encoder tokens of its row: this step's where it has them, else the
        cache's.
        """
        for row, start, end, length, fresh, cached in zip(*(part.tolist() for part in self), strict=True):
            tokens = slice(start, end)
            if not length:
                answer.put_nothing(tokens, -np.inf if scoring.sinks is None else scoring.sinks.flatten())
                continue
            keys = step.cached(row, 0, length) if cached else step.fresh(fresh, fresh + length)
            over_keys(step, scoring, answer, tokens, keys)
