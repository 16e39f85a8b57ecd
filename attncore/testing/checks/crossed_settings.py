"""What a spec declares, crossed: features, long contexts and every method of a layer, in each dtype, layout and cache.

A backend has kernels of its own for such pairs, or leaves out an argument in one of them: tests of each alone pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from attncore.testing.engines.engine import Engine
from attncore.testing.engines.every_method_engine import EveryMethodAdoptingEngine, EveryMethodEngine
from attncore.testing.engines.given_caches import FORMS, pair_of_views
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.engines.run_long_contexts import LONGEST, run_long_contexts
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named, require_declared, value_head
from attncore.testing.harness.declared_samples import (
    FEATURES,
    LONG_FEATURES,
    TOGETHER,
    in_one_layer,
    of_a_feature,
)
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_every_method_in_a_dtype",
    "test_every_method_in_a_layout",
    "test_every_method_over_a_cache_dtype",
    "test_every_method_over_a_pair_of_views",
    "test_every_method_over_adopted_steps",
    "test_every_method_with_a_group_of_heads",
    "test_every_method_with_a_value_head",
    "test_long_contexts_with_a_feature",
    "test_long_contexts_with_large_heads",
]
LARGE_HEADS = (128, 256)


@covers("long contexts")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_long_contexts_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Over 1,100 keys, a chunk of 300 behind 700: a part of them is read by kernels that a short step does not run."""
    attncore_subject.require_phase("prefill", "decode")
    features = of_a_feature(feature, attncore_subject.form.features, LONG_FEATURES)
    run_long_contexts(attncore_subject.backend(), LONGEST, **features)


@covers("long contexts")
@pytest.mark.parametrize("head_size", LARGE_HEADS)
def test_long_contexts_with_large_heads(attncore_subject: Subject, head_size: int) -> None:
    """Of larger heads a kernel reads other keys at a time, and splits them elsewhere: by every method, and by
    ``forward`` with all features.
    """
    attncore_subject.require_phase("prefill", "decode")
    if attncore_subject.form.mla_only or head_size not in attncore_subject.form.head_sizes:
        raise UnsupportedError(f"its spec does not declare heads of {head_size}")
    backend = attncore_subject.backend(head_size=head_size)
    if head_size == LARGE_HEADS[0]:
        run_long_contexts(backend)
    run_long_contexts(backend, LONGEST, make=Engine, **in_one_layer(features_of(backend), LONG_FEATURES))


@covers("dtype {dtype}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_method_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Short and long contexts, without a feature and with all that are declared."""
    require_declared(dtype, attncore_subject.form.dtypes)
    _run(attncore_subject, f"dtype {dtype}", dtype=dtype)


@covers("layout {layout}")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_every_method_in_a_layout(attncore_subject: Subject, layout: str) -> None:
    """The same in each layout of the cache."""
    require_declared(layout, attncore_subject.form.kv_cache_layouts)
    is_base = layout == attncore_subject.backend().config.kv_cache_layout
    _run(attncore_subject, f"layout {layout}", long=not is_base, kv_cache_layout=layout)


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_every_method_over_a_cache_dtype(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """The same over a cache of each dtype."""
    require_declared(kv_cache_dtype, attncore_subject.form.kv_cache_dtypes)
    is_base = kv_cache_dtype == attncore_subject.request().kv_cache_dtype
    _run(attncore_subject, f"cache {kv_cache_dtype}", long=not is_base, kv_cache_dtype=kv_cache_dtype)


@covers("strided_kv_cache")
def test_every_method_over_a_pair_of_views(attncore_subject: Subject) -> None:
    """The same over a pair of views, of each form and with short contexts; of one with long ones."""
    attncore_subject.require("strided_kv_cache")
    for form in FORMS:
        what, is_first = f"a pair of views ({form})", form == next(iter(FORMS))
        _run(attncore_subject, what, pair_of_views(form), long=is_first, strided_kv_cache=True)


@covers("value head size")
def test_every_method_with_a_value_head(attncore_subject: Subject) -> None:
    """The same with values smaller than keys, or larger where none are."""
    _run(attncore_subject, "a value head", head_size_v=value_head(attncore_subject))


@covers("grouped heads")
@pytest.mark.parametrize("num_kv_heads", [4, 1], ids=["4-4", "4-1"])
def test_every_method_with_a_group_of_heads(attncore_subject: Subject, num_kv_heads: int) -> None:
    """The same where each head has a key head of its own, and where all have one, of which libraries have kernels."""
    if attncore_subject.form.mla_only:
        raise UnsupportedError("its spec says mla_only: all heads have one key head in every test")
    _run(attncore_subject, f"4 heads over {num_kv_heads}", num_kv_heads=num_kv_heads)


@covers("adopted steps")
def test_every_method_over_adopted_steps(attncore_subject: Subject) -> None:
    """Long contexts in steps that are made of an engine's own tensors, without a feature and with all."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    with named("adopted steps", "long contexts"):
        run_long_contexts(backend, make=EveryMethodAdoptingEngine)
    if features := in_one_layer(features_of(backend), LONG_FEATURES):
        with named("adopted steps", "long contexts and all declared features"):
            run_long_contexts(backend, make=EveryMethodAdoptingEngine, **features)


def _run(subject: Subject, what: str, cache: Any = None, *, long: bool = True, **changes: Any) -> None:
    """Short steps with all features, adopted ones too, then long ones without any and with all, for the base request
    with ``changes``.
    """
    # One of its own where the cache is: a shared one may take a smaller cache that it allocated for the layers'.
    backend = subject.backend(**changes) if cache is None else subject.another(**changes)
    declared = features_of(backend)
    given: dict[str, Any] = {} if cache is None else {"cache": cache}
    with named(what, "all declared features"):
        features = in_one_layer(declared)
        run_around_a_block(subject, backend, make=EveryMethodEngine, **given, **features)
    with named(what, "adopted steps and all declared features"):
        run_around_a_block(subject, backend, make=EveryMethodAdoptingEngine, **given, **features)
    if not long or len(subject.form.phases) == 1:
        return
    with named(what, "long contexts"):
        run_long_contexts(backend, **given)
    if features := in_one_layer(declared, LONG_FEATURES):
        with named(what, "long contexts and all declared features"):
            run_long_contexts(backend, **given, **features)
