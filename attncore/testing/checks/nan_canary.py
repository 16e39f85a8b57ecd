"""The NaN canary: what a request does not own is NaN, so that reading any of it shows."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES
from attncore.testing.harness.draw_batches import batches, explore
from attncore.testing.harness.subject import Subject

__all__ = ["test_nothing_is_read_that_no_request_owns", "test_nothing_is_read_under_a_window"]


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
