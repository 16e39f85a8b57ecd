"""Cross attention over the cached keys of an encoder, where the spec declares ``encoder_decoder``."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st

from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.every_method_engine import EveryMethodCrossEngine
from attncore.testing.engines.run_long_contexts import SPREAD
from attncore.testing.engines.steps_on_device import reads_page_lists
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named, require_declared, value_head
from attncore.testing.harness.declared_samples import FEATURES, LONG_FEATURES, in_one_layer, own_scale
from attncore.testing.harness.draw_batches import explore, lengths
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_cross_attention_in_a_dtype",
    "test_cross_attention_in_a_layout",
    "test_cross_attention_of_the_list_builder",
    "test_cross_attention_of_the_persistent_builder",
    "test_cross_attention_over_a_cache_dtype",
    "test_cross_attention_over_long_encoders",
    "test_cross_attention_reads_only_its_own",
    "test_cross_attention_with_a_feature",
    "test_cross_attention_with_a_value_head",
    "test_rows_without_encoder_tokens_give_zeros",
]
ACROSS = {name: FEATURES[name] for name in ("logits_soft_cap", "sinks")}
"""Windows and slopes have no meaning across."""
LONG = 5, 530, 1500
"""Encoder tokens of requests."""


def _cross(subject: Subject, **given: Any) -> CrossEngine:
    """An engine of a cross layer with a scale of its own, as of a model that has 1."""
    subject.require("encoder_decoder")
    backend = subject.backend()
    return CrossEngine(backend, scale=own_scale(backend), **given)


@covers("encoder_decoder")
def test_cross_attention_of_the_persistent_builder(attncore_subject: Subject, attncore_examples: int) -> None:
    """Prompts bring their encoder's keys; later steps, beside other prompts, read them from the cache."""
    attncore_subject.require_phase("prefill", "decode")
    _cross(attncore_subject)

    def check(encoders: list[int], queries: list[int], extra: int, seed: int) -> None:
        engine = _cross(attncore_subject, seed=seed)
        for name, (length, count) in enumerate(zip(encoders, queries, strict=False)):
            engine.add(name, length)
            engine.cross_step({**dict.fromkeys(engine.tables, 1), name: count}, extra=extra)
        engine.remove(0)
        if engine.tables:
            engine.cross_step(dict.fromkeys(engine.tables, 1))

    strategies: dict[str, Any] = {
        "encoders": st.lists(lengths(attncore_subject.backend().config.block_size), min_size=1, max_size=4),
        "queries": st.lists(st.integers(1, 9), min_size=4, max_size=4),
        "extra": st.integers(0, 2),
        "seed": st.integers(0, 999),
    }
    explore(check, attncore_examples, **strategies)


@covers("encoder_decoder")
def test_cross_attention_of_the_list_builder(attncore_subject: Subject) -> None:
    """Prompts alone, whose cross table is empty; decodes, padded as for a graph too; both; and a profiling run."""
    attncore_subject.require_phase("prefill", "decode")
    engine = _cross(attncore_subject)
    if reads_page_lists(attncore_subject.form):
        raise UnsupportedError("the list builder makes no page lists of an encoder's keys")
    size = engine.block_size
    for name, length in enumerate((1, size, 2 * size + 1, 5)):
        engine.add(name, length)
    engine.cross_list_step({0: 3, 1: 1}, [])
    engine.cross_list_step({2: 2}, [0, 1])
    engine.cross_list_step({}, [2, 0, 1])
    if attncore_subject.form.cuda_graph != "never":
        engine.cross_list_step({}, [1, 2], pad=2)
    engine.cross_list_step({3: 4}, [], profiling=True)


@covers("encoder_decoder")
def test_cross_attention_reads_only_its_own(attncore_subject: Subject) -> None:
    """NaN in every block that no encoder token owns, and in unused rows unless the spec declares ``finite_tail``."""
    attncore_subject.require_phase("prefill", "decode")
    engine = _cross(attncore_subject, junk=math.nan)
    size = engine.block_size
    for name, length in enumerate((1, size - 1, size, size + 1, 2 * size + 1)):
        engine.add(name, max(1, length))
    engine.cross_step(dict.fromkeys(range(5), 2))
    engine.remove(1)
    engine.cross_step({0: 1, 2: 1, 3: 3, 4: 1})


@covers("encoder_decoder")
def test_rows_without_encoder_tokens_give_zeros(attncore_subject: Subject) -> None:
    """A request without encoder input, beside others with it, in its prompt and in its decodes."""
    attncore_subject.require_phase("prefill", "decode")
    engine = _cross(attncore_subject)
    for name, length in enumerate((5, 0, 9)):
        engine.add(name, length)
    engine.cross_step({0: 2, 1: 3, 2: 1})
    engine.cross_step({0: 1, 1: 1, 2: 1})


@covers("encoder_decoder")
@pytest.mark.parametrize("feature", ACROSS)
def test_cross_attention_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Soft caps and sinks."""
    attncore_subject.require(feature)
    attncore_subject.require_phase("prefill", "decode")
    engine = _cross(attncore_subject, **FEATURES[feature])
    for name, length in enumerate((5, 12)):
        engine.add(name, length)
    engine.cross_step({0: 2, 1: 4})
    engine.cross_step({0: 1, 1: 1})


@covers("encoder_decoder")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Every method, over up to 150 keys, without a feature and with those that are declared, in each dtype."""
    require_declared(dtype, attncore_subject.form.dtypes)
    _by_every_method(attncore_subject, f"dtype {dtype}", dtype=dtype)


@covers("encoder_decoder")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_cross_attention_in_a_layout(attncore_subject: Subject, layout: str) -> None:
    """The same in each layout of the cache."""
    require_declared(layout, attncore_subject.form.kv_cache_layouts)
    _by_every_method(attncore_subject, f"layout {layout}", kv_cache_layout=layout)


@covers("encoder_decoder")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_cross_attention_over_a_cache_dtype(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """The same over a cache of each dtype."""
    require_declared(kv_cache_dtype, attncore_subject.form.kv_cache_dtypes)
    _by_every_method(attncore_subject, f"cache {kv_cache_dtype}", kv_cache_dtype=kv_cache_dtype)


@covers("encoder_decoder")
def test_cross_attention_over_long_encoders(attncore_subject: Subject) -> None:
    """Every method, over up to 1,500 keys, as of half a minute of speech, without a feature and with those that are
    declared."""
    attncore_subject.require("encoder_decoder")
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    scale, num_blocks = SPREAD * backend.config.head_size**-0.5, sum(-(-n // backend.config.block_size) for n in LONG)
    across = {name: LONG_FEATURES[name] for name in ACROSS}
    for features in ({}, in_one_layer(features_of(backend), across)):
        engine = EveryMethodCrossEngine(backend, num_blocks=num_blocks + 8, scale=scale, **features)
        for name, length in enumerate(LONG):
            engine.add(name, length)
        engine.cross_step({0: 2, 1: 1, 2: 40})
        engine.cross_step({0: 1, 1: 1, 2: 1})


@covers("encoder_decoder")
def test_cross_attention_with_a_value_head(attncore_subject: Subject) -> None:
    """The same with values of another size than keys."""
    attncore_subject.require("encoder_decoder")
    _by_every_method(attncore_subject, "a value head", head_size_v=value_head(attncore_subject))


def _by_every_method(subject: Subject, what: str, **changes: Any) -> None:
    subject.require("encoder_decoder")
    subject.require_phase("prefill", "decode")
    backend = subject.backend(**changes)
    for features in ({}, in_one_layer(features_of(backend), ACROSS)):
        with named(what):
            engine = EveryMethodCrossEngine(backend, **features)
            for name, length in enumerate((5, 0, 150)):
                engine.add(name, length)
            engine.cross_step({0: 2, 1: 1, 2: 4})
            engine.cross_step({0: 1, 1: 1, 2: 1})
