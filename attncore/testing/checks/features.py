"""Optional features: tested where the spec declares them, shown as unsupported, with its reason, where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncore.testing.engines.engine import NUM_BLOCKS, Engine
from attncore.testing.engines.every_method_engine import EveryMethodAdoptingEngine, EveryMethodEngine
from attncore.testing.engines.run_batches import run_around_a_block, run_batch, run_decodes_alone, run_drawn_batches
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, SLOPES, in_one_layer, own_scale
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_feature_over_random_batches",
    "test_a_feature_that_is_a_tensor",
    "test_alibi_slopes_in_any_order",
    "test_all_declared_features_together",
    "test_decodes_of_several_tokens",
    "test_drafts_beside_other_rows",
    "test_standard_alibi_slopes",
    "test_window_off_by_one",
]
MOST_DRAFTED = 5
"""Tokens of a decode: one and its drafts."""


@covers("{feature}")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_over_random_batches(attncore_subject: Subject, attncore_examples: int, feature: str) -> None:
    """Mixed batches of any lengths, with the feature on."""
    attncore_subject.require(feature)
    backend = attncore_subject.backend()
    run_drawn_batches(attncore_subject, backend, attncore_examples, **FEATURES[feature])


@covers("sliding_window")
@pytest.mark.parametrize("window", ["1", "2", "block-1", "block", "block+1", "2*block+1", "129"])
def test_window_off_by_one(attncore_subject: Subject, window: str) -> None:
    """A window is the number of tokens a query sees, itself included: one more or one less is wrong."""
    attncore_subject.require("sliding_window")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    of_blocks = {"block-1": size - 1, "block": size, "block+1": size + 1, "2*block+1": 2 * size + 1}
    wide = max(1, of_blocks[window]) if window in of_blocks else int(window)
    batch = attncore_subject.around_a_block(size)
    for context in {wide - 1, wide, wide + 1}:
        if "decode" in attncore_subject.form.phases:
            batch.append((context, 1))
        if "prefill" in attncore_subject.form.phases:
            batch.append((context, 2))
    most = sum(-(-(context + query_len + 1) // size) for context, query_len in batch)
    engine = Engine(backend, num_blocks=NUM_BLOCKS + most, sliding_window=wide)
    run_batch(engine, batch)
    run_decodes_alone(engine)


@covers("alibi")
def test_alibi_slopes_in_any_order(attncore_subject: Subject) -> None:
    """Slopes are those given, one a query head, also where they are not the standard ones of so many heads."""
    attncore_subject.require("alibi")
    backend = attncore_subject.backend()
    run_around_a_block(attncore_subject, backend, alibi_slopes=SLOPES)


@covers("{feature}")
@pytest.mark.parametrize("feature", ["alibi", "sinks"])
def test_a_feature_that_is_a_tensor(attncore_subject: Subject, feature: str) -> None:
    """Slopes and sinks as tensors: float32 on the host, and on the device as a parameter of the model's dtype."""
    attncore_subject.require(feature)
    backend = attncore_subject.backend()
    ((argument, numbers),) = FEATURES[feature].items()
    held = torch.tensor(numbers, dtype=getattr(torch, backend.config.dtype), device=backend.config.device)
    for given in (torch.tensor(numbers), torch.nn.Parameter(held, requires_grad=False)):
        features: dict[str, Any] = {argument: given}
        run_around_a_block(attncore_subject, backend, **features)


@covers("alibi_standard")
def test_standard_alibi_slopes(attncore_subject: Subject) -> None:
    """The slopes ``2 ** (-8 i / n)`` of n heads."""
    attncore_subject.require("alibi_standard")
    backend = attncore_subject.backend()
    heads = backend.config.num_heads
    slopes = tuple(2.0 ** (-8 * i / heads) for i in range(1, heads + 1))
    run_around_a_block(attncore_subject, backend, alibi_slopes=slopes)


@covers("features together")
def test_all_declared_features_together(attncore_subject: Subject) -> None:
    """Whatever of window, soft cap, slopes and sinks the spec declares, in one layer."""
    declared = [name for name in FEATURES if name in attncore_subject.form.features]
    if len(declared) < 2:
        raise UnsupportedError("its spec declares fewer than two of these features")
    backend = attncore_subject.backend()
    features = {argument: value for name in declared for argument, value in FEATURES[name].items()}
    run_around_a_block(attncore_subject, backend, **features)


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


@covers("multi_token_decode")
@pytest.mark.parametrize("builder", ["persistent", "adopted"])
def test_drafts_beside_other_rows(attncore_subject: Subject, builder: str) -> None:
    """Decodes of up to five tokens in steps of the builders for engines with drafts: of one length, of several, and
    beside a prompt and a chunk; by every method, without a feature and with all that are declared. The scale is the
    layer's."""
    attncore_subject.require("multi_token_decode")
    attncore_subject.require_phase("decode")
    backend, declared = attncore_subject.backend(), attncore_subject.form.features
    make = EveryMethodEngine if builder == "persistent" else EveryMethodAdoptingEngine
    size, scale = backend.config.block_size, own_scale(backend)
    contexts = {"a": 1, "b": size, "c": 2 * size + 1, "chunk": size + 1}
    for features in ({}, in_one_layer(declared)):
        engine = make(backend, decode_threshold=MOST_DRAFTED, scale=scale, **features)
        for name, context in contexts.items():
            engine.add(name, context + 3 * MOST_DRAFTED + size)
        engine.fill(contexts)
        engine.step(dict.fromkeys(contexts, 3))
        engine.step({"a": 1, "b": MOST_DRAFTED, "c": 2, "chunk": 3})
        if "prefill" in engine.phases:
            engine.add("prompt", size + MOST_DRAFTED)
            engine.step({"a": 3, "b": 1, "c": MOST_DRAFTED, "chunk": MOST_DRAFTED + 1, "prompt": size + MOST_DRAFTED})
