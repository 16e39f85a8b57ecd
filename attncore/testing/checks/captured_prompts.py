"""Graphs of a number of tokens, in which prompts and chunks of them run beside decodes, for specs that say ``always``:
alone, and crossed with what a spec declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from attncore.abstract import AttentionBackend
from attncore.testing.checks.captured_sizes import require_any_lengths, require_captured
from attncore.testing.engines.captured_long_chunks_engine import CapturedLongChunksEngine
from attncore.testing.engines.captured_prompts_engine import CapturedPromptsEngine
from attncore.testing.engines.captured_spans_engine import CapturedSpansEngine
from attncore.testing.engines.given_caches import FORMS, pair_of_views
from attncore.testing.engines.run_long_contexts import SPREAD
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named, require_another, require_declared, value_head
from attncore.testing.harness.declared_samples import FEATURES, LONG_FEATURES, TOGETHER, in_one_layer, of_a_feature
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_captured_prompts_beside_decodes",
    "test_captured_prompts_in_a_dtype",
    "test_captured_prompts_in_a_layout",
    "test_captured_prompts_over_a_cache_dtype",
    "test_captured_prompts_over_a_pair_of_views",
    "test_captured_prompts_over_long_contexts",
    "test_captured_prompts_with_a_feature",
    "test_captured_prompts_with_a_group_of_heads",
    "test_captured_prompts_with_a_value_head",
    "test_captured_prompts_with_spans",
]
STEPS, SIZES = 6, ((4, 24), (8, 96))
"""Of each setting."""


@covers("captured prompts")
def test_captured_prompts_beside_decodes(attncore_subject: Subject, attncore_captured_steps: int) -> None:
    """Prompts, chunks of them and decodes, in graphs of a number of tokens."""
    _require_captured(attncore_subject)
    replay_prompts(CapturedPromptsEngine(attncore_subject.backend()), attncore_captured_steps)


@covers("captured prompts")
def test_captured_prompts_over_long_contexts(attncore_subject: Subject) -> None:
    """Chunks behind 1,030 keys beside short ones and decodes."""
    _require_captured(attncore_subject)
    _run_long(attncore_subject.backend(), {})


@covers("captured prompts")
def test_captured_prompts_with_spans(attncore_subject: Subject, attncore_captured_steps: int) -> None:
    """Each replay sees the spans of its step, and none of the step before."""
    attncore_subject.require("bidirectional_spans")
    _require_captured(attncore_subject)
    replay_prompts(CapturedSpansEngine(attncore_subject.backend()), attncore_captured_steps)


@covers("captured prompts")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_captured_prompts_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Each feature that is declared, and all: over short contexts, and long ones."""
    _require_captured(attncore_subject)
    declared, backend = attncore_subject.form.features, attncore_subject.backend()
    replay_prompts(CapturedPromptsEngine(backend, sizes=SIZES, **of_a_feature(feature, declared)))
    _run_long(backend, of_a_feature(feature, declared, LONG_FEATURES))


@covers("captured prompts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_prompts_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Without a feature and with all that are declared, in each dtype."""
    require_declared(dtype, attncore_subject.form.dtypes)
    require_another(dtype, attncore_subject.request().dtype)
    _run_both(attncore_subject, f"dtype {dtype}", dtype=dtype)


@covers("captured prompts")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_captured_prompts_in_a_layout(attncore_subject: Subject, layout: str) -> None:
    """The same in each layout of the cache."""
    require_declared(layout, attncore_subject.form.kv_cache_layouts)
    require_another(layout, attncore_subject.backend().config.kv_cache_layout)
    _run_both(attncore_subject, f"layout {layout}", kv_cache_layout=layout)


@covers("captured prompts")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_captured_prompts_over_a_cache_dtype(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """The same over a cache of each dtype."""
    require_declared(kv_cache_dtype, attncore_subject.form.kv_cache_dtypes)
    require_another(kv_cache_dtype, attncore_subject.request().kv_cache_dtype)
    _run_both(attncore_subject, f"cache {kv_cache_dtype}", kv_cache_dtype=kv_cache_dtype)


@covers("captured prompts")
def test_captured_prompts_over_a_pair_of_views(attncore_subject: Subject) -> None:
    """The same over a pair of views."""
    attncore_subject.require("strided_kv_cache")
    form = next(iter(FORMS))
    _run_both(attncore_subject, f"a pair of views ({form})", pair_of_views(form), strided_kv_cache=True)


@covers("captured prompts")
def test_captured_prompts_with_a_value_head(attncore_subject: Subject) -> None:
    """The same with values of another size than keys."""
    _run_both(attncore_subject, "a value head", head_size_v=value_head(attncore_subject))


@covers("captured prompts")
@pytest.mark.parametrize("num_kv_heads", [4, 1], ids=["4-4", "4-1"])
def test_captured_prompts_with_a_group_of_heads(attncore_subject: Subject, num_kv_heads: int) -> None:
    """The same where each head has a key head of its own, and where all have one."""
    if attncore_subject.form.mla_only:
        raise UnsupportedError("its spec says mla_only: all heads have one key head in every test")
    _run_both(attncore_subject, f"4 heads over {num_kv_heads}", num_kv_heads=num_kv_heads)


def _require_captured(subject: Subject) -> None:
    require_captured(subject, 1)
    require_any_lengths(subject)


def replay_prompts(engine: CapturedPromptsEngine, steps: int = STEPS) -> None:
    """So many steps of requests that come and go."""
    for _ in range(steps):
        engine.change()
        engine.replayed()


def _run_long(backend: AttentionBackend, features: Mapping[str, Any]) -> None:
    scale = SPREAD * backend.config.head_size**-0.5
    CapturedLongChunksEngine(backend, **{"scale": scale, **features}).run()


def _run_both(subject: Subject, what: str, cache: Any = None, **changes: Any) -> None:
    """Short steps without a feature and with all that are declared, long ones with all."""
    _require_captured(subject)
    backend = subject.backend(**changes) if cache is None else subject.another(**changes)
    declared, given = features_of(backend), {} if cache is None else {"cache": cache}
    with named(what):
        replay_prompts(CapturedPromptsEngine(backend, sizes=SIZES, **given))
    with named(what, "all declared features"):
        replay_prompts(CapturedPromptsEngine(backend, sizes=SIZES, **given, **in_one_layer(declared)))
        _run_long(backend, given | in_one_layer(declared, LONG_FEATURES))
