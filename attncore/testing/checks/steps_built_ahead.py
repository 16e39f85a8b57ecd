"""Steps that are built, and planned, before an earlier one's layers have run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attncore.testing.engines.builder_engine import BuilderEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_a_step_is_built_before_the_last_one_runs", "test_steps_of_two_builders_take_turns"]


@contextmanager
def _another_plan_may_be_refused() -> Iterator[None]:
    """A backend that keeps the last plan alone says so when layers of another step run: wrong numbers are no answer."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("metadata"):
            raise UnsupportedError(str(error)) from error
        raise


def _engines(subject: Subject, depth: int, count: int) -> list[BuilderEngine]:
    """Engines of one backend, each with a layer, a cache and requests of other lengths than the others'."""
    backend = subject.backend()
    engines = [BuilderEngine(backend, depth=depth, seed=number) for number in range(count)]
    backend.forget_layers()
    for number, engine in enumerate(engines):  # each has made the backend forget the layers of those before it
        engine.impl = backend.impl(f"layers.{number}", **engine.features)
        for name in range(3):
            engine.add(name, 4 * engine.block_size + 8)
        engine.fill({name: 1 + engine.block_size * (1 + (name + number) % 3) - name for name in range(3)})
    return engines


def _steps(subject: Subject) -> list[dict[Any, int]]:
    """Tokens by request: steps of the same shape and of others."""
    if "decode" not in subject.form.phases:
        return [{0: 2, 1: 2, 2: 2}, {1: 2}, {0: 3, 2: 2}]
    more = [{0: 1, 1: 3}, {2: 4}] if "prefill" in subject.form.phases else []
    return [{0: 1, 1: 1, 2: 1}, {1: 1}, {0: 1, 2: 1}, *more]


@covers("plans of several steps")
def test_steps_of_two_builders_take_turns(attncore_subject: Subject) -> None:
    """Two builders of one backend: both build, and plan, before the layers of the first one's step run. A plan belongs
    to its step (``metadata.kept``), and not to the backend or a layer."""
    first, second = _engines(attncore_subject, 1, 2)
    steps = _steps(attncore_subject)
    for ours, theirs in zip(steps, [*steps[:1], *steps[:0:-1]], strict=True):
        built, other = first.build(ours), second.build(theirs)
        with _another_plan_may_be_refused():
            first.run_built(built, ours)
            second.run_built(other, theirs)


@covers("plans of several steps")
def test_a_step_is_built_before_the_last_one_runs(attncore_subject: Subject) -> None:
    """A builder of ``depth`` 2: the next step is built, and planned, before the layers of this one run."""
    if attncore_subject.backend().config.device != "cpu":
        raise UnsupportedError("on a device a step is sent when it is built: its layers are launched before the next")
    (engine,) = _engines(attncore_subject, 2, 1)
    one = 1 if "decode" in engine.phases else 2
    last = 3 if "prefill" in engine.phases else 1
    # Requests keep their rows: a host's page list is gathered when it is asked for, and only until rows have moved.
    steps = [{0: one, 1: one, 2: one}, {0: one}, {0: one, 1: last}, {0: one, 1: one, 2: last}]
    built = engine.build(steps[0])
    for scheduled, following in zip(steps, [*steps[1:], steps[0]], strict=True):
        ahead = engine.build(following)
        if ahead.moves:
            raise UnsupportedError("rows moved while a step waited for its layers, whose table is then another's")
        with _another_plan_may_be_refused():
            engine.run_built(built, scheduled)
        built = ahead
    with _another_plan_may_be_refused():
        engine.run_built(built, steps[0])
