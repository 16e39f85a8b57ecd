"""The backend's own list builder, ``get_builder_cls()(..., backend=backend)``: it plans the steps, which
``advance_step`` moves on, and its state writes those of captured sizes.

A backend that cannot read such steps says so by a ValueError that begins with ``metadata``, and is shown as
unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from attncore.builder.lists.dialects import DIALECTS
from attncore.testing.engines.own_list_builder import CapturedListEngine, ListBuilderEngine
from attncore.testing.engines.steps_on_device import reads_page_lists
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, TOGETHER, of_a_feature
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

__all__ = [
    "test_a_feature_of_captured_sizes_of_its_own_list_builder",
    "test_a_feature_of_its_own_list_builder",
    "test_captured_sizes_of_its_own_list_builder",
    "test_steps_of_its_own_list_builder",
]
STEPS = 10
"""Replays of each feature."""


@contextmanager
def _may_be_refused(backend: AttentionBackend) -> Iterator[None]:
    """UnsupportedError where the backend refuses such steps; ConformanceError where its builder lacks page lists."""
    try:
        yield
    except Exception as error:
        raised = error.__cause__ if isinstance(error, ConformanceError) else error  # of a captured run
        if isinstance(raised, ValueError) and str(raised).startswith("metadata"):
            raise UnsupportedError(str(raised)) from error
        layout = type(backend).list_layout
        if isinstance(error, AttributeError) and reads_page_lists(backend.spec) and not DIALECTS[layout].page_lists:
            able = ", ".join(repr(name) for name, dialect in DIALECTS.items() if dialect.page_lists)
            raise ConformanceError(
                f"{told(error)}: its spec declares page lists, which steps of list_layout = {layout!r} have not; set "
                f"list_layout = {able} in its class"
            ) from error
        raise


@covers("list builder for the backend")
@pytest.mark.parametrize("chunked_prefill", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_steps_of_its_own_list_builder(attncore_subject: Subject, window: int | None, chunked_prefill: bool) -> None:
    """Prompts, decodes, and both; steps that ``advance_step`` moves on, in which prompts become decodes."""
    attncore_subject.require_phase("prefill", "decode")
    features = {}
    if window is not None:
        attncore_subject.require("sliding_window")
        features = {"sliding_window": window}
    backend = attncore_subject.backend()
    with _may_be_refused(backend):
        engine = ListBuilderEngine(backend, chunked_prefill=chunked_prefill, **features)
        size = engine.block_size
        prompts = {"a": 2 * size + 1, "b": size, "c": 2, "d": size - 1}
        for name, length in prompts.items():
            engine.add(name, length + 2 * size + 16)
        engine.step(prompts)
        engine.step(dict.fromkeys(prompts, 1))
        for _ in range(size):  # some row starts a block
            engine.advance()
        engine.add("e", 3 * size + 8)
        engine.step({"a": 1, "e": size + 1, "d": 1})
        engine.advance()
        engine.step({"d": 3, "e": size, "b": 1} if chunked_prefill else {"d": 1, "b": 1})
        engine.step({"c": 1})


@covers("list builder for the backend")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_a_feature_of_its_own_list_builder(attncore_subject: Subject, feature: str) -> None:
    """Prompts, decodes, both, and a step that has advanced, with each feature that is declared, and all."""
    attncore_subject.require_phase("prefill", "decode")
    features = of_a_feature(feature, attncore_subject.form.features)
    backend = attncore_subject.backend()
    with _may_be_refused(backend):
        engine = ListBuilderEngine(backend, chunked_prefill=True, **features)
        prompts = {"a": 2 * engine.block_size + 1, "b": 3}
        for name, length in prompts.items():
            engine.add(name, length + 16)
        engine.step(prompts)
        engine.step({"a": 1, "b": 4})
        engine.step(dict.fromkeys(prompts, 1))
        engine.advance()


@covers("captured sizes of the list builder")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_a_feature_of_captured_sizes_of_its_own_list_builder(attncore_subject: Subject, feature: str) -> None:
    """Decodes of the state's captured sizes, with each feature that is declared, and all."""
    attncore_subject.require_graphs("prefill", "decode")
    features = of_a_feature(feature, attncore_subject.form.features)
    _replay(attncore_subject.backend(), STEPS, **features)


@covers("captured sizes of the list builder")
def test_captured_sizes_of_its_own_list_builder(attncore_subject: Subject, attncore_captured_steps: int) -> None:
    """Decodes of the state's captured sizes, written by ``prepare`` and ``build`` in turns, over batches that grow,
    shrink and change their order; prompts and empty steps in between."""
    attncore_subject.require_graphs("prefill", "decode")
    _replay(attncore_subject.backend(), attncore_captured_steps)


def _replay(backend: AttentionBackend, steps: int, **features: Any) -> None:
    with _may_be_refused(backend):
        engine = CapturedListEngine(backend, **features)
        for _ in range(steps):
            engine.change()
            engine.replayed()
