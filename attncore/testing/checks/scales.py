"""Scales of an fp8 cache: numbers and tensors, of all heads or of each, set late, calculated, seen by graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from attncore.abstract import AttentionBackend
from attncore.abstract.scales import HEADROOM
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.every_method_engine import EveryMethodAdoptingEngine, EveryMethodEngine
from attncore.testing.engines.given_caches import FORMS, MakeCache, allocated, pair_of_views
from attncore.testing.engines.held_numbers import check_held_numbers
from attncore.testing.engines.run_batches import run_batch, run_decodes_alone
from attncore.testing.engines.run_long_contexts import SPREAD, run_long_contexts
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named
from attncore.testing.harness.declared_samples import in_one_layer
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_calculated_scales",
    "test_captured_sizes_of_a_scaled_cache",
    "test_captured_sizes_see_scales_that_are_set",
    "test_scales_beside_other_settings",
    "test_scales_of_an_fp8_cache",
    "test_scales_of_each_head",
    "test_scales_on_the_device",
    "test_scales_set_after_the_layer_is_made",
]
LARGE = 1024.0
"""Without it keys or values are beyond what e4m3 holds: a small scale, ignored both ways, would not show."""
OF_HEADS = {"k_scale": (1024.0, 256.0), "v_scale": (512.0, 2048.0)}
"""Of the two key/value heads of a request: another head's, and the other tensor's, are wrong by factors. Where a layer
writes and reads by them, what the cache holds shows it."""


class _Setting(NamedTuple):
    """What scales are crossed with: in words, the backend, features of the layer, its cache."""

    what: str
    backend: AttentionBackend
    features: dict[str, Any]
    cache: MakeCache = allocated


def _backend(subject: Subject, feature: str, **changes: Any) -> AttentionBackend:
    subject.require(feature)
    dtypes = sorted(name for name in subject.form.kv_cache_dtypes if name.startswith("fp8"))
    if not dtypes:
        raise UnsupportedError("its spec declares no fp8 cache")
    return subject.backend(kv_cache_dtype=dtypes[0], **changes)


def _features(backend: AttentionBackend, **scales: Any) -> dict[str, Any]:
    """Arguments of a layer whose scores are of order one for all that."""
    largest = float(torch.as_tensor(scales.get("k_scale", 1.0)).max())
    return {"scale": backend.config.head_size**-0.5 / largest, **scales}


def _run(subject: Subject, backend: AttentionBackend, **scales: Any) -> None:
    """Requests at the edges of blocks, of a layer with these scales, and what its cache holds; then by every method."""
    for make in (Engine, EveryMethodEngine):
        engine = make(backend, **_features(backend, **scales))
        run_batch(engine, subject.around_a_block(backend.config.block_size))
        run_decodes_alone(engine)
        check_held_numbers(engine)


@covers("kv_scales")
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_scales_of_an_fp8_cache(attncore_subject: Subject, argument: str) -> None:
    """``k_scale`` and ``v_scale`` multiply what an fp8 cache holds."""
    backend = _backend(attncore_subject, "kv_scales")
    _run(attncore_subject, backend, **{argument: LARGE})


@covers("kv_scales_on_device")
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_scales_on_the_device(attncore_subject: Subject, argument: str) -> None:
    """The same as tensors of one element, beside a number."""
    backend = _backend(attncore_subject, "kv_scales_on_device")
    _run(attncore_subject, backend, **{argument: torch.tensor(LARGE)})


@covers("kv_scales_per_head")
def test_scales_of_each_head(attncore_subject: Subject) -> None:
    """A scale for each key/value head, others for keys than for values."""
    backend = _backend(attncore_subject, "kv_scales_per_head")
    scales = {name: _of_heads(backend, numbers) for name, numbers in OF_HEADS.items()}
    _run(attncore_subject, backend, **scales)


@pytest.mark.parametrize("feature", ["kv_scales", "kv_scales_on_device", "kv_scales_per_head"])
@covers("{feature}")
def test_scales_beside_other_settings(attncore_subject: Subject, feature: str) -> None:
    """All features in a layer, a pair of views, another layout, bfloat16, adopted steps, and longer contexts: where a
    kernel may leave out a scale, or multiply what a cap has bounded.
    """
    for what, backend, features, cache in _settings(attncore_subject, feature):
        given = {**_features(backend, **_scales(backend, feature)), **features, "cache": cache}
        for make in (EveryMethodEngine, EveryMethodAdoptingEngine):
            with named("scales", what):
                engine = make(backend, **given)
                run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))
                run_decodes_alone(engine)
    if len(attncore_subject.form.phases) > 1:
        backend = _backend(attncore_subject, feature)
        given = _features(backend, **_scales(backend, feature))
        with named("scales", "long contexts"):
            run_long_contexts(backend, **{**given, "scale": SPREAD * given["scale"]})


@pytest.mark.parametrize("kind", ["numbers", "on_device", "per_head"])
@covers("scales set later")
def test_scales_set_after_the_layer_is_made(attncore_subject: Subject, kind: str) -> None:
    """``set_scales`` counts from the next step on: of a layer made without scales, and of one made with others."""
    feature = "kv_scales" if kind == "numbers" else f"kv_scales_{kind}"
    backend = _backend(attncore_subject, feature)
    wanted = _scales(backend, feature)
    features = _features(backend, **wanted)
    for before in ({}, {name: 2 * scale for name, scale in wanted.items()}):
        engine = Engine(backend, scale=features["scale"], **before)
        engine.impl.set_scales(**wanted)
        engine.features.update(wanted)
        engine.earlier_scales = {"k_scale": 1.0, "v_scale": 1.0, **before}
        run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))
        check_held_numbers(engine)


@covers("kv_scales_on_device")
def test_calculated_scales(attncore_subject: Subject) -> None:
    """``calculate_kv_scales`` makes the scales that the steps after it are kept with."""
    backend = _backend(attncore_subject, "kv_scales_on_device")
    config = backend.config
    largest = torch.finfo(backend.kv_cache_torch_dtype()).max
    engine = Engine(backend, scale=config.head_size**-0.5 / 256)
    size_v = config.head_size_v or config.head_size
    first: dict[str, torch.Tensor] = {}
    for name, size, scale in (("key", config.head_size, 256.0), ("value", size_v, 64.0)):
        first[name] = torch.ones(3, config.num_kv_heads, size)
        first[name][1, 0, 0] = -scale * largest / HEADROOM  # a power of two as the scale: the cache holds all exactly
    dtype = getattr(torch, config.dtype)
    if any(not bool(numbers.to(dtype).isfinite().all()) for numbers in first.values()):
        raise UnsupportedError(f"numbers that such a cache is scaled for are beyond {config.dtype}")
    key, value = engine.on_device(first.values())
    engine.impl.calculate_kv_scales(key, None if config.use_mla else value)
    wanted = {"k_scale": 256.0, "v_scale": 256.0 if config.use_mla else 64.0}  # latent values are keys
    for name, scale in wanted.items():
        found = torch.as_tensor(getattr(engine.impl, name)).flatten().tolist()
        if found != [scale] * len(found):
            raise ConformanceError(f"calculate_kv_scales made {name} {found}, not {scale}")
    engine.features.update(wanted)
    run_batch(engine, attncore_subject.around_a_block(config.block_size))


@covers("kv_scales")
def test_captured_sizes_of_a_scaled_cache(attncore_subject: Subject) -> None:
    """Decodes that are captured with scales that are numbers."""
    attncore_subject.require_graphs("prefill", "decode")
    backend = _backend(attncore_subject, "kv_scales")
    engine = CapturedEngine(backend, 1, **_features(backend, **_scales(backend, "kv_scales")))
    for _ in range(8):
        engine.change()
        engine.replayed()


@covers("kv_scales_on_device")
def test_captured_sizes_see_scales_that_are_set(attncore_subject: Subject) -> None:
    """Decodes that were captured before ``set_scales`` are replayed with the scales that it set."""
    attncore_subject.require_graphs("prefill", "decode")
    backend = _backend(attncore_subject, "kv_scales_on_device")
    before: dict[str, Any] = {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}
    engine = CapturedEngine(backend, 1, scale=backend.config.head_size**-0.5 / LARGE, **before)
    wanted = {"k_scale": torch.tensor(LARGE), "v_scale": torch.tensor(LARGE / 2)}
    engine.impl.set_scales(**wanted)
    engine.features.update(wanted)
    engine.earlier_scales = before
    for _ in range(8):
        engine.change()
        engine.replayed()


def _scales(backend: AttentionBackend, feature: str) -> dict[str, Any]:
    """Other scales for keys than for values."""
    if feature == "kv_scales_per_head":
        return {name: _of_heads(backend, numbers) for name, numbers in OF_HEADS.items()}
    scales = {"k_scale": LARGE, "v_scale": LARGE / 2}
    return scales if feature == "kv_scales" else {name: torch.tensor(number) for name, number in scales.items()}


def _settings(subject: Subject, feature: str) -> Iterator[_Setting]:
    """The declared settings that scales are crossed with, but those that a spec's own check refuses beside them."""
    base = _backend(subject, feature)
    if features := in_one_layer(features_of(base)):
        yield _Setting("all declared features", base, features)
    yield _Setting("adopted steps", base, {})
    if "strided_kv_cache" in features_of(base):
        yield _Setting("a pair of views", base, {}, pair_of_views(next(iter(FORMS))))
    layouts = [layout for layout in subject.form.kv_cache_layouts if layout != base.config.kv_cache_layout]
    others: list[dict[str, str]] = [{"kv_cache_layout": layout} for layout in layouts]
    if "bfloat16" in subject.form.dtypes and base.config.dtype != "bfloat16":
        others.append({"dtype": "bfloat16"})
    for other in others:
        try:
            backend = _backend(subject, feature, **other)
        except UnsupportedError:
            continue
        yield _Setting(" ".join(other.values()), backend, {})


def _of_heads(backend: AttentionBackend, numbers: tuple[float, ...]) -> torch.Tensor:
    heads = backend.config.num_kv_heads
    return torch.tensor([numbers[head % len(numbers)] for head in range(heads)])
