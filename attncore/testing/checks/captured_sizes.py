"""Captured sizes of the persistent builder, replayed over batches that grow, shrink and change their order.

On a CUDA device the graphs are CUDA's own; elsewhere a stand-in records the layer and calls it again.
"""

from __future__ import annotations

import pytest

from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import CapturedLongEngine
from attncore.testing.engines.captured_reading_engine import WRITERS, CapturedReadingEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_captured_sizes_of_any_lengths",
    "test_captured_sizes_over_changing_batches",
    "test_captured_sizes_over_changing_lengths",
    "test_captured_sizes_without_writing",
]
DRAFTS = 2


@covers("captured sizes")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_captured_sizes_over_changing_batches(
    attncore_subject: Subject, attncore_captured_steps: int, tokens: int
) -> None:
    """Decodes of one token, and of drafts beside it: every replay gives what dense attention gives."""
    require_captured(attncore_subject, tokens)
    engine = CapturedEngine(attncore_subject.backend(), tokens)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


@covers("captured sizes")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_captured_sizes_over_changing_lengths(attncore_subject: Subject, tokens: int) -> None:
    """Rows that grow and shrink between 2 and 3,000 tokens from replay to replay: an older plan is wrong."""
    require_captured(attncore_subject, tokens)
    CapturedLongEngine(attncore_subject.backend(num_heads=2, num_kv_heads=1), tokens).run()


@covers("captured sizes")
def test_captured_sizes_of_any_lengths(attncore_subject: Subject, attncore_captured_steps: int) -> None:
    """Rows of one token to as many as drafts make, each of its own, in one graph: for specs that say ``always``."""
    require_captured(attncore_subject, 1 + DRAFTS)
    require_any_lengths(attncore_subject)
    engine = CapturedEngine(attncore_subject.backend(), 2 + DRAFTS, any_lengths=True)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


@covers("captured sizes without writing")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
@pytest.mark.parametrize("written_by", WRITERS)
def test_captured_sizes_without_writing(
    attncore_subject: Subject, attncore_captured_steps: int, written_by: str, tokens: int
) -> None:
    """One graph writes the step's keys, by another layer or by ``write_cache``; in the next the layer attends with
    ``write=False``, is handed None or NaN for them, and changes no byte."""
    require_captured(attncore_subject, tokens)
    engine = CapturedReadingEngine(attncore_subject.backend(), tokens, written_by=written_by)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


def require_captured(subject: Subject, tokens: int) -> None:
    """UnsupportedError where decodes of so many tokens are not captured."""
    subject.require_graphs("prefill", "decode")
    if tokens > 1:
        subject.require("multi_token_decode")
        if subject.form.cuda_graph == "uniform_decode":
            raise UnsupportedError("its spec declares graphs of decodes of one token only")


def require_any_lengths(subject: Subject) -> None:
    """UnsupportedError where rows of different lengths are not captured."""
    if subject.form.cuda_graph != "always":
        raise UnsupportedError("its spec declares graphs of rows of one length only")
