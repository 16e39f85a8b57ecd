"""Captured sizes, crossed with what a spec declares: features, dtypes, layouts, caches, and heads of values.

A captured step runs by a kernel, or a plan, of its own, which may leave out what the others do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from attncore.abstract import AttentionBackend
from attncore.testing.checks.captured_sizes import DRAFTS, require_captured
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import SHORTER, CapturedLongEngine
from attncore.testing.engines.captured_reading_engine import CapturedReadingEngine
from attncore.testing.engines.given_caches import FORMS, pair_of_views
from attncore.testing.engines.run_long_contexts import SPREAD
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named, require_another, require_declared, value_head
from attncore.testing.harness.declared_samples import FEATURES, LONG_FEATURES, TOGETHER, in_one_layer, of_a_feature
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_captured_drafts_with_features",
    "test_captured_sizes_in_a_dtype",
    "test_captured_sizes_in_a_layout",
    "test_captured_sizes_over_a_cache_dtype",
    "test_captured_sizes_over_a_pair_of_views",
    "test_captured_sizes_with_a_feature",
    "test_captured_sizes_with_a_group_of_heads",
    "test_captured_sizes_with_a_value_head",
    "test_captured_sizes_with_features_without_writing",
]
STEPS = 10
"""Of short contexts, in each setting."""


@covers("captured sizes")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_captured_sizes_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Each feature that is declared, and all: over short contexts, and lengths that change from replay to replay."""
    require_captured(attncore_subject, 1)
    declared = attncore_subject.form.features
    short, long = (of_a_feature(feature, declared, samples) for samples in (FEATURES, LONG_FEATURES))
    _run(attncore_subject.backend(), short, long)


@covers("captured sizes")
def test_captured_drafts_with_features(attncore_subject: Subject) -> None:
    """Decodes with drafts, of a layer with all features that are declared."""
    require_captured(attncore_subject, 1 + DRAFTS)
    backend = attncore_subject.backend()
    declared = _some_of(backend)
    _run(backend, in_one_layer(declared), in_one_layer(declared, LONG_FEATURES), tokens=1 + DRAFTS)


@covers("captured sizes without writing")
def test_captured_sizes_with_features_without_writing(attncore_subject: Subject) -> None:
    """``write=False`` in a graph, of a layer with all features that are declared."""
    require_captured(attncore_subject, 1)
    backend = attncore_subject.backend()
    features = in_one_layer(_some_of(backend))
    _replay(CapturedReadingEngine(backend, 1, written_by="write_cache", **features))


@covers("captured sizes")
@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_sizes_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Without a feature and with all that are declared, in each dtype."""
    require_declared(dtype, attncore_subject.form.dtypes)
    require_another(dtype, attncore_subject.request().dtype)
    _run_both(attncore_subject, f"dtype {dtype}", dtype=dtype)


@covers("captured sizes")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_captured_sizes_in_a_layout(attncore_subject: Subject, layout: str) -> None:
    """The same in each layout of the cache."""
    require_declared(layout, attncore_subject.form.kv_cache_layouts)
    require_another(layout, attncore_subject.backend().config.kv_cache_layout)
    _run_both(attncore_subject, f"layout {layout}", kv_cache_layout=layout)


@covers("captured sizes")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_captured_sizes_over_a_cache_dtype(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """The same over a cache of each dtype."""
    require_declared(kv_cache_dtype, attncore_subject.form.kv_cache_dtypes)
    require_another(kv_cache_dtype, attncore_subject.request().kv_cache_dtype)
    _run_both(attncore_subject, f"cache {kv_cache_dtype}", kv_cache_dtype=kv_cache_dtype)


@covers("captured sizes")
def test_captured_sizes_over_a_pair_of_views(attncore_subject: Subject) -> None:
    """The same over a pair of views."""
    attncore_subject.require("strided_kv_cache")
    form = next(iter(FORMS))
    _run_both(attncore_subject, f"a pair of views ({form})", pair_of_views(form), strided_kv_cache=True)


@covers("captured sizes")
def test_captured_sizes_with_a_value_head(attncore_subject: Subject) -> None:
    """The same with values of another size than keys."""
    _run_both(attncore_subject, "a value head", head_size_v=value_head(attncore_subject))


@covers("captured sizes")
@pytest.mark.parametrize("num_kv_heads", [4, 1], ids=["4-4", "4-1"])
def test_captured_sizes_with_a_group_of_heads(attncore_subject: Subject, num_kv_heads: int) -> None:
    """The same where each head has a key head of its own, and where all have one."""
    if attncore_subject.form.mla_only:
        raise UnsupportedError("its spec says mla_only: all heads have one key head in every test")
    _run_both(attncore_subject, f"4 heads over {num_kv_heads}", num_kv_heads=num_kv_heads)


def _some_of(backend: AttentionBackend) -> Collection[str]:
    """The features that ``backend`` declares; UnsupportedError where none of the samples' is among them."""
    declared = features_of(backend)
    if not in_one_layer(declared):
        raise UnsupportedError("its spec declares none of these features")
    return declared


def _run_both(subject: Subject, what: str, cache: Any = None, **changes: Any) -> None:
    require_captured(subject, 1)
    backend = subject.backend(**changes) if cache is None else subject.another(**changes)
    declared, given = features_of(backend), {} if cache is None else {"cache": cache}
    with named(what):
        _run(backend, given, given)
    if short := in_one_layer(declared):
        with named(what, "all declared features"):
            _run(backend, given | short, given | in_one_layer(declared, LONG_FEATURES))


def _run(backend: AttentionBackend, short: Mapping[str, Any], long: Mapping[str, Any], tokens: int = 1) -> None:
    """Captured sizes over changing batches, of a layer made with ``short``; over changing lengths, with ``long``."""
    _replay(CapturedEngine(backend, tokens, **short))
    scale = SPREAD * backend.config.head_size**-0.5
    CapturedLongEngine(backend, tokens, contexts=SHORTER, scale=scale, **long).run()


def _replay(engine: CapturedEngine) -> None:
    for _ in range(STEPS):
        engine.change()
        engine.replayed()
