"""Optional features: tested where the spec declares them, shown as unsupported, with its reason, where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from attncore.registry.spec.sizes import MultipleOf
from attncore.testing.engines.engine import Engine, run_rows
from attncore.testing.harness.covers import covers, explore, rows
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_a_feature_over_random_batches",
    "test_alibi_slopes_in_any_order",
    "test_all_declared_features_together",
    "test_decodes_of_several_tokens",
    "test_dtype",
    "test_kv_cache_dtype",
    "test_kv_cache_layout",
    "test_scales_of_an_fp8_cache",
    "test_standard_alibi_slopes",
    "test_window_off_by_one",
]
SLOPES = (0.5, 0.0625, 0.25, 0.125)  # of no standard order, so that slopes made from a head's number show
LARGE_SCALE = 1024.0
FEATURES: dict[str, dict[str, Any]] = {
    "sliding_window": {"sliding_window": 6},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0)},
}


@covers("{feature}")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_over_random_batches(attncore_subject: Subject, attncore_examples: int, feature: str) -> None:
    """Mixed batches of any lengths, with the feature on."""
    attncore_subject.require(feature)
    backend = attncore_subject.backend(num_heads=4, num_kv_heads=2)
    phases = attncore_subject.form.phases
    kinds = {} if len(phases) > 1 else {"contexts": True, "decode": "decode" in phases}

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        run_rows(Engine(backend, seed=seed, **FEATURES[feature]), batch)

    explore(check, attncore_examples, batch=rows(backend.config.block_size, **kinds), seed=st.integers(0, 999))


@covers("sliding_window")
@pytest.mark.parametrize("window", ["1", "2", "block-1", "block", "block+1", "2*block+1"])
def test_window_off_by_one(attncore_subject: Subject, window: str) -> None:
    """A window is the number of tokens a query sees, itself included: one more or one less is wrong."""
    attncore_subject.require("sliding_window")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    tokens = {"1": 1, "2": 2, "block-1": size - 1, "block": size, "block+1": size + 1, "2*block+1": 2 * size + 1}
    wide = max(1, tokens[window])
    batch = attncore_subject.around_a_block(size)
    for context in {wide - 1, wide, wide + 1}:
        if "decode" in attncore_subject.form.phases:
            batch.append((context, 1))
        if "prefill" in attncore_subject.form.phases:
            batch.append((context, 2))
    run_rows(Engine(backend, sliding_window=wide), batch)


@covers("alibi")
def test_alibi_slopes_in_any_order(attncore_subject: Subject) -> None:
    """Slopes are those given, one a query head, also where they are not the standard ones of so many heads."""
    attncore_subject.require("alibi")
    backend = attncore_subject.backend(num_heads=4, num_kv_heads=2)
    run_rows(Engine(backend, alibi_slopes=SLOPES), attncore_subject.around_a_block(backend.config.block_size))


@covers("alibi_standard")
def test_standard_alibi_slopes(attncore_subject: Subject) -> None:
    """The slopes ``2 ** (-8 i / n)`` of n heads."""
    attncore_subject.require("alibi_standard")
    backend = attncore_subject.backend(num_heads=4, num_kv_heads=2)
    slopes = tuple(2.0 ** (-8 * i / 4) for i in range(1, 5))
    run_rows(Engine(backend, alibi_slopes=slopes), attncore_subject.around_a_block(backend.config.block_size))


@covers("features together")
def test_all_declared_features_together(attncore_subject: Subject) -> None:
    """Whatever of window, soft cap, slopes and sinks the spec declares, in one layer."""
    declared = [name for name in FEATURES if name in attncore_subject.form.features]
    if len(declared) < 2:
        raise UnsupportedError("its spec declares fewer than two of these features")
    backend = attncore_subject.backend(num_heads=4, num_kv_heads=2)
    features = {argument: value for name in declared for argument, value in FEATURES[name].items()}
    run_rows(Engine(backend, **features), attncore_subject.around_a_block(backend.config.block_size))


@covers("multi_token_decode")
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_decodes_of_several_tokens(attncore_subject: Subject, tokens: int) -> None:
    """Decodes of several query tokens, as speculative decoding makes them."""
    attncore_subject.require("multi_token_decode")
    backend = attncore_subject.backend()
    engine = Engine(backend)
    contexts = {"a": 1, "b": backend.config.block_size, "c": 2 * backend.config.block_size + 1}
    for name, context in contexts.items():
        engine.add(name, context + tokens)
    engine.fill(contexts)
    engine.list_step({}, dict.fromkeys(contexts, tokens))


@covers("dtype {dtype}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Query, key, value and output of each dtype that is declared."""
    if dtype not in attncore_subject.form.dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(dtype=dtype)
    run_rows(Engine(backend), attncore_subject.around_a_block(backend.config.block_size))


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_kv_cache_dtype(attncore_subject: Subject, attncore_examples: int, kv_cache_dtype: str) -> None:
    """A cache of each dtype that is declared."""
    if kv_cache_dtype not in attncore_subject.form.kv_cache_dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_dtype=kv_cache_dtype)
    run_rows(Engine(backend), attncore_subject.around_a_block(backend.config.block_size))


@covers("kv_scales")
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_scales_of_an_fp8_cache(attncore_subject: Subject, argument: str) -> None:
    """``k_scale`` and ``v_scale`` multiply what an fp8 cache holds."""
    attncore_subject.require("kv_scales")
    dtypes = sorted(name for name in attncore_subject.form.kv_cache_dtypes if name.startswith("fp8"))
    if not dtypes:
        raise UnsupportedError("its spec declares no fp8 cache")
    backend = attncore_subject.backend(kv_cache_dtype=dtypes[0])
    # Without it keys or values are beyond what e4m3 holds: a small one, ignored both ways, would not show.
    features: dict[str, Any] = {argument: LARGE_SCALE}
    if argument == "k_scale":
        features["scale"] = backend.config.head_size**-0.5 / LARGE_SCALE
    run_rows(Engine(backend, **features), attncore_subject.around_a_block(backend.config.block_size))


@covers("layout {layout}")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_kv_cache_layout(attncore_subject: Subject, layout: str) -> None:
    """A cache in each layout that is declared."""
    if layout not in attncore_subject.form.kv_cache_layouts:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_layout=layout)
    if backend.config.kv_cache_layout != layout:
        raise ConformanceError(f"asked for layout {layout}, the backend was made for {backend.config.kv_cache_layout}")
    run_rows(Engine(backend), attncore_subject.around_a_block(backend.config.block_size))


def edges(declared: object, most: int) -> list[int]:
    """The sizes at the edges of a set of sizes: up to six of a finite set with both ends; of multiples the first two
    and the largest, below ``most``."""
    if isinstance(declared, MultipleOf):
        found = {declared.base, 2 * declared.base, declared.maximum or 0}
        found.add(most // declared.base * declared.base)
        return sorted(size for size in found if 0 < size <= most and size in declared)
    sizes = sorted(declared)  # type: ignore[call-overload]
    return sizes if len(sizes) <= 6 else [*sizes[:3], *sizes[-3:]]
