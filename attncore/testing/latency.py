"""The latency suite for pytest-benchmark, adopted by a test file of two lines::

    from attncore.testing.latency import *
    BACKEND = "acme"

It times build, plan, commit (all that an engine's call does: build, plan, and the host's part of sending the step to
the device) and forward of a step over ``SHAPES`` and over saved steps. The file may set ``STEPS`` (a batch file, as
`attncore replay --save-steps` writes it), ``REQUEST`` (fields of the AttentionRequest), ``DEVICE`` and ``OPTIONS``.
`attncore bench acme` needs neither a file nor pytest, times the reference beside it and compares with saved runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attncore.testing.engines.timed_steps import REQUEST, SAVED, SHAPES, Timed
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["attncore_timed", "pytest_plugins", "test_build", "test_commit", "test_forward", "test_plan"]
pytest_plugins = ("attncore.testing.harness.pytest_plugin",)


@pytest.fixture(scope="module", params=[*SHAPES, SAVED])
def attncore_timed(request: pytest.FixtureRequest) -> Iterator[Timed]:
    """A backend and the steps to time, made once for all tests."""
    module = request.module
    name = getattr(module, "BACKEND", None)
    if not isinstance(name, str):
        raise ValueError('BACKEND: the test file must name the backend: BACKEND = "acme"')
    subject = Subject(
        name,
        device=getattr(module, "DEVICE", None),
        options=getattr(module, "OPTIONS", None),
        checks_needs=False,
    )
    fields = {**REQUEST, **getattr(module, "REQUEST", {})}
    try:
        yield Timed(subject, request.param, fields, getattr(module, "STEPS", None))
    except UnsupportedError as error:
        pytest.skip(f"unsupported: {error}")


def _info(benchmark: Any, timed: Timed, group: str) -> None:
    benchmark.group = group
    benchmark.extra_info.update(
        backend=timed.backend.name,
        device=timed.config.device,
        steps=len(timed.metadata),
        tokens=timed.num_tokens,
        block_size=timed.config.block_size,
    )


def test_build(benchmark: Any, attncore_timed: Timed) -> None:
    """The metadata of a step, on the host."""
    _info(benchmark, attncore_timed, "build")
    benchmark.pedantic(attncore_timed.build, setup=attncore_timed.reset, rounds=200, warmup_rounds=10)


def test_plan(benchmark: Any, attncore_timed: Timed) -> None:
    """The backend's plan of a step."""
    _info(benchmark, attncore_timed, "plan")
    benchmark(attncore_timed.plan)


def test_commit(benchmark: Any, attncore_timed: Timed) -> None:
    """All that an engine's call does before the first layer: build, plan, and the host's part of sending the step."""
    _info(benchmark, attncore_timed, "commit")
    benchmark.extra_info["transport"] = attncore_timed.transport
    benchmark.pedantic(attncore_timed.commit, setup=attncore_timed.reset, rounds=200, warmup_rounds=10)


def test_forward(benchmark: Any, attncore_timed: Timed) -> None:
    """One layer's attention of a step, until the device is done."""
    _info(benchmark, attncore_timed, "forward")
    attncore_timed.plan()
    benchmark(attncore_timed.forward)
