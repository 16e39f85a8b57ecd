"""The NaN canary: what a request does not own is NaN, so that reading any of it shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st

from attncore.testing.engines.engine import JUNK, Engine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES
from attncore.testing.harness.draw_batches import batches, explore
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_nothing_is_read_that_a_window_has_passed",
    "test_nothing_is_read_that_no_request_owns",
    "test_nothing_is_read_under_a_window",
]
FAR = 300
"""Keys, more than a kernel reads at a time, so that some of a tile lie beyond a window and others within."""


def _explore(subject: Subject, examples: int, **features: Any) -> None:
    backend = subject.backend(**({"num_heads": 4, "num_kv_heads": 2} if features else {}))
    decodes = "decode" in subject.form.phases

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        engine = Engine(backend, junk=math.nan, seed=seed, **features)
        run_batch(engine, batch)
        engine.remove(0)  # its blocks turn to NaN under the others
        if engine.history and decodes:
            for name in engine.batch.req_ids:
                engine.grow(name)
            engine.step(dict.fromkeys(engine.batch.req_ids, 1))

    explore(check, examples, batch=batches(backend.config.block_size, **subject.drawn_phases), seed=st.integers(0, 999))


@covers("NaN canary")
def test_nothing_is_read_that_no_request_owns(attncore_subject: Subject, attncore_examples: int) -> None:
    """NaN in every block that no request owns, the null block too; and in the unused slots of last blocks,
    unless the spec declares ``finite_tail``."""
    _explore(attncore_subject, attncore_examples)


@covers("NaN canary")
def test_nothing_is_read_under_a_window(attncore_subject: Subject, attncore_examples: int) -> None:
    """The same with a window, where the spec declares one."""
    attncore_subject.require("sliding_window")
    _explore(attncore_subject, attncore_examples, **FEATURES["sliding_window"])


@covers("NaN canary")
@pytest.mark.parametrize("window", [6, "a block and 3"])
def test_nothing_is_read_that_a_window_has_passed(attncore_subject: Subject, window: int | str) -> None:
    """Contexts longer than a window, whose blocks are released as it passes them: they are null in the table, and hold
    NaN, as the null block does. Where the spec declares ``finite_passed_blocks`` it is another finite number."""
    attncore_subject.require("sliding_window")
    backend = attncore_subject.backend()
    size, phases = backend.config.block_size, attncore_subject.form.phases
    width = window if isinstance(window, int) else size + 3
    contexts = {"far": max(FAR, 5 * size + 1) if "prefill" in phases else 5 * size + 1, "near": 3 * size, "short": 2}
    lengths = {name: context + 3 * size + 8 for name, context in contexts.items()}
    blocks = 2 + sum(-(-length // size) for length in lengths.values())
    junk = JUNK if attncore_subject.form.finite_passed_blocks else math.nan
    engine = Engine(backend, junk=junk, num_blocks=blocks, sliding_window=width)
    for name, length in lengths.items():
        engine.add(name, length)
    engine.fill(contexts)
    chunks = ({"far": 3, "near": 1, "short": 1}, {"far": size + 2, "short": 1}) if len(phases) > 1 else ()
    each = 1 if "decode" in phases else 2
    for scheduled in (*chunks, *[dict.fromkeys(contexts, each)] * (size // each)):
        for name in contexts:
            engine.release_passed(name, width)
        engine.step(scheduled)
