"""Spans in prompts, where the spec declares `bidirectional_spans`: their tokens see each other in both directions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from attncore.testing.engines.engine import NUM_BLOCKS
from attncore.testing.engines.reading_engine import METHODS, ReadingEngine, by_method
from attncore.testing.engines.span_engine import SpanEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, own_scale
from attncore.testing.harness.draw_batches import explore
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_long_spans",
    "test_short_spans_that_count_as_decodes",
    "test_spans_behind_a_window",
    "test_spans_by_another_method",
    "test_spans_in_chunks",
    "test_spans_of_any_shape",
    "test_spans_over_random_batches",
    "test_spans_with_a_feature",
    "test_spans_without_a_cache",
]

SHAPES = {
    "one": (12, [(3, 9)]),
    "whole prompt": (10, [(0, 10)]),
    "at both ends": (14, [(0, 5), (9, 14)]),
    "that touch": (16, [(2, 6), (6, 11), (11, 12)]),
    "single tokens": (8, [(1, 2), (4, 5)]),
}
"""Tokens of a prompt, and its spans."""

LONG = 600  # tokens of a prompt: more than a kernel reads, and more queries than it takes, in one part


class ReadingSpanEngine(ReadingEngine, SpanEngine):
    """Spans of a layer that attends without writing."""


@covers("bidirectional_spans")
def test_spans_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Prompts with spans and without, whole and in chunks, beside decodes, in steps that are padded too. The scale
    is the layer's."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    scale = own_scale(backend)

    def check(seed: int) -> None:
        random, engine = np.random.default_rng(seed), SpanEngine(backend, seed=seed, scale=scale)
        left: dict[int, list[int]] = {}
        for name in range(int(random.integers(1, 5))):
            tokens = int(random.integers(1, 3 * engine.block_size))
            engine.add(name, tokens + 8)
            if random.integers(0, 4):
                bounds = random.choice(tokens + 1, min(tokens + 1, 2 * int(random.integers(1, 4))), replace=False)
                edges = sorted(int(bound) for bound in bounds)
                engine.set_spans(name, list(zip(edges[::2], edges[1::2], strict=False)))
            left[name] = engine.chunks(name, tokens, random)
        while any(left.values()):
            scheduled = {name: chunks.pop(0) if chunks else 1 for name, chunks in left.items()}
            engine.step(scheduled, pad_tokens=int(random.integers(0, 2)))
            for name in scheduled:
                engine.grow(name, 8)
        engine.step(dict.fromkeys(left, 1))

    explore(check, attncore_examples, seed=st.integers(0, 9999))


@covers("bidirectional_spans")
@pytest.mark.parametrize("shape", SHAPES)
def test_spans_of_any_shape(attncore_subject: Subject, shape: str) -> None:
    """One span, all of a prompt, several that touch; beside a prompt without, and behind another prompt's tokens."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill")
    engine, tokens = _of_shape(attncore_subject, shape)
    engine.step({"plain": 5})
    engine.step({"plain": tokens - 5, "spans": tokens, "again": tokens})


@covers("bidirectional_spans")
@pytest.mark.parametrize("method", METHODS)
def test_spans_by_another_method(attncore_subject: Subject, method: str) -> None:
    """What a span's tokens see of each other is in the cache already, or the log-sum-exp is asked for, too."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill")
    engine = by_method(attncore_subject, method, SpanEngine, ReadingSpanEngine)
    for shape, (tokens, spans) in SHAPES.items():
        engine.add(shape, tokens + 1)
        engine.set_spans(shape, spans)
    engine.step({shape: tokens for shape, (tokens, _) in SHAPES.items()})


@covers("bidirectional_spans")
def test_spans_in_chunks(attncore_subject: Subject) -> None:
    """A span behind a context, which its tokens see whole, and computed spans before it; decodes see all of them."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill", "decode")
    engine = SpanEngine(attncore_subject.backend())
    size = engine.block_size
    first, second = (2, 2 + size), (size + 4, 2 * size + 5)
    engine.add("a", 2 * size + 12)
    engine.add("b", 2 * size + 12)
    for name in "ab":
        engine.set_spans(name, [first, second])
    engine.step({"a": first[1] + 1, "b": first[0]})
    engine.step({"a": second[1] - first[1], "b": first[1] - first[0] + 1})
    engine.step({"a": 1, "b": second[1] - first[1] - 1})
    engine.step({"a": 1, "b": 3})
    engine.step({"a": 1, "b": 1})


@covers("bidirectional_spans")
def test_short_spans_that_count_as_decodes(attncore_subject: Subject) -> None:
    """A prompt's last chunk of few tokens is a decode for the builder, beside decodes of drafts."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require("multi_token_decode")
    attncore_subject.require_phase("prefill", "decode")
    engine = SpanEngine(attncore_subject.backend())
    engine.take_for_decodes(4)
    size = max(engine.block_size, 4)
    for name, spans in (("a", [(size, size + 4)]), ("b", [(0, 2), (size - 1, size + 1)]), ("drafts", [])):
        engine.add(name, size + 8)
        engine.set_spans(name, spans)
    engine.step({"a": size, "b": size - 2, "drafts": size})
    engine.step({"a": 4, "b": 4, "drafts": 3})
    engine.step({"a": 1, "b": 1, "drafts": 3})


@covers("bidirectional_spans")
@pytest.mark.parametrize("feature", FEATURES)
def test_spans_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """A window hides no token of a span from the others, and slopes go by the distance in either direction."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill")
    attncore_subject.require(feature)
    backend = attncore_subject.backend()
    engine = SpanEngine(backend, **FEATURES[feature])
    size = engine.block_size
    for name, context in (("new", 0), ("chunk", size + 3)):
        engine.add(name, context + 40)
        engine.set_spans(name, [(context + 2, context + 22), (context + 22, context + 25)])
        if context:
            engine.step({name: context})
    engine.step({"new": 30, "chunk": 30})
    if "decode" in attncore_subject.form.phases:
        engine.step({"new": 1, "chunk": 1})


@covers("bidirectional_spans")
@pytest.mark.parametrize("shape", SHAPES)
def test_spans_without_a_cache(attncore_subject: Subject, shape: str) -> None:
    """A step of the prompts' own tokens (``new_tokens_metadata``), which has no cache and no table."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill")
    engine, tokens = _of_shape(attncore_subject, shape)
    engine.step_without_cache({"plain": 5, "spans": tokens, "again": tokens})


def _of_shape(subject: Subject, shape: str) -> tuple[SpanEngine, int]:
    """An engine with a prompt without spans and two of a shape of SHAPES, and how many tokens that has."""
    engine = SpanEngine(subject.backend())
    tokens, spans = SHAPES[shape]
    for name in ("plain", "spans", "again"):
        engine.add(name, tokens + 1)
        if name != "plain":
            engine.set_spans(name, spans)
    return engine, tokens


@covers("bidirectional_spans")
def test_spans_behind_a_window(attncore_subject: Subject) -> None:
    """Blocks that the window has passed are null and other requests' when a chunk begins with a span."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill", "decode")
    attncore_subject.require("sliding_window")
    engine = SpanEngine(attncore_subject.backend(), sliding_window=5)
    context = max(3 * engine.block_size, 16)
    for name in "ab":
        engine.add(name, context + 40)
        engine.set_spans(name, [(4, 12), (context, context + 20), (context + 21, context + 30)])
        engine.step({name: context})
        engine.release_passed(name, 5)
    engine.add("other", max(2 * engine.block_size, 7))
    engine.step({"a": 20, "b": 30, "other": 7})
    engine.release_passed("a", 5)
    engine.step({"a": 10, "b": 1})
    engine.step({"a": 1, "b": 1})


@covers("bidirectional_spans")
@pytest.mark.parametrize("window", [None, 100, 430])
def test_long_spans(attncore_subject: Subject, window: int | None) -> None:
    """Spans of hundreds of tokens, of which the first see keys that lie many blocks behind them."""
    attncore_subject.require("bidirectional_spans")
    attncore_subject.require_phase("prefill")
    if window is not None:
        attncore_subject.require("sliding_window")
    backend = attncore_subject.backend()
    num_blocks = NUM_BLOCKS + 2 * (LONG + 16) // backend.config.block_size + 2
    engine = SpanEngine(backend, num_blocks=num_blocks, sliding_window=window)
    for name, spans in (("a", [(70, 390), (400, 590)]), ("b", [(140, LONG)])):
        engine.add(name, LONG + 4)
        engine.set_spans(name, spans)
    engine.step({"a": 64, "b": 130})
    engine.step({"a": LONG - 64, "b": LONG - 130})
