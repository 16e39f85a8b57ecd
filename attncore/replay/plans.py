"""How long the plans of a run's backends take: they are made inside of ``build``, and are no part of the metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncore.abstract import AttentionBackend, AttentionMetadata


class Plans:
    """A clock that runs while a backend plans."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        self.exist = False
        """Whether a backend plans at all."""

    def timed(self, plan: Callable[[AttentionMetadata], None], metadata: AttentionMetadata) -> None:
        start = perf_counter_ns()
        plan(metadata)
        self.nanoseconds += perf_counter_ns() - start


@contextmanager
def timed_plans(backend: AttentionBackend | Mapping[str, AttentionBackend] | None) -> Iterator[Plans]:
    """The clock of the plans that builders call which are made meanwhile; ``backend`` is what a builder takes."""
    given = [] if backend is None else list(backend.values()) if isinstance(backend, Mapping) else [backend]
    planning = list({id(one): one for one in given if one.has_plan}.values())
    plans = Plans()
    plans.exist = bool(planning)
    own = [vars(one).get("plan") for one in planning]
    for one in planning:
        vars(one)["plan"] = partial(plans.timed, one.plan)
    try:
        yield plans
    finally:
        for one, before in zip(planning, own, strict=True):
            if before is None:
                del vars(one)["plan"]
            else:
                vars(one)["plan"] = before
