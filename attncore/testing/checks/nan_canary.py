"""The NaN canary: what a request does not own is NaN, so that reading any of it shows."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from attncore.testing.checks.features import FEATURES
from attncore.testing.engines.engine import Engine, run_rows
from attncore.testing.harness.covers import covers, explore, rows
from attncore.testing.harness.subject import Subject

__all__ = ["test_nothing_is_read_that_no_request_owns", "test_nothing_is_read_under_a_window"]


def _explore(subject: Subject, examples: int, **features: Any) -> None:
    backend = subject.backend(**({"num_heads": 4, "num_kv_heads": 2} if features else {}))
    phases = subject.form.phases
    kinds = {} if len(phases) > 1 else {"contexts": True, "decode": "decode" in phases}

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        engine = Engine(backend, junk=math.nan, seed=seed, **features)
        run_rows(engine, batch)
        engine.remove(0)  # its blocks turn to NaN under the others
        if engine.said and "decode" in phases:
            for name in engine.batch.req_ids:
                engine.grow(name)
            engine.step(dict.fromkeys(engine.batch.req_ids, 1))

    explore(check, examples, batch=rows(backend.config.block_size, **kinds), seed=st.integers(0, 999))


@covers("NaN canary")
def test_nothing_is_read_that_no_request_owns(attncore_subject: Subject, attncore_examples: int) -> None:
    """NaN in every block that nobody owns, the null block and the sink; and in the unused rows of last pages, unless
    the spec declares ``finite_tail``."""
    _explore(attncore_subject, attncore_examples)


@covers("NaN canary")
def test_nothing_is_read_under_a_window(attncore_subject: Subject, attncore_examples: int) -> None:
    """The same with a window, where the spec declares one."""
    attncore_subject.require("sliding_window")
    _explore(attncore_subject, attncore_examples, **FEATURES["sliding_window"])
