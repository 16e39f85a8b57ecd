"""Captured sizes of the persistent builder, replayed over batches that grow, shrink and change their order.

On a CUDA device the graphs are CUDA's own; elsewhere a stand-in records the layer and calls it again.
"""

from __future__ import annotations

import pytest

from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_captured_sizes_over_changing_batches"]
DRAFTS = 2


@covers("captured sizes")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_captured_sizes_over_changing_batches(
    attncore_subject: Subject, attncore_captured_steps: int, tokens: int
) -> None:
    """Decodes of one token, and of drafts beside it: every replay gives what dense attention gives."""
    attncore_subject.require_graphs("prefill", "decode")
    if tokens > 1:
        attncore_subject.require("multi_token_decode")
        if attncore_subject.form.cuda_graph == "uniform_decode":
            raise UnsupportedError("its spec declares graphs of decodes of one token only")
    engine = CapturedEngine(attncore_subject.backend(), tokens)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()
