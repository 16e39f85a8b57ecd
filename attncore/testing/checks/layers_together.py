"""Layers that differ share a step: a plan is made for each kind, and what one layer keeps is not another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.layers import Layers
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, OTHER_VALUES, SCALES
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_feature_of_the_first_layers_and_not_of_the_last",
    "test_layers_of_two_cache_groups",
    "test_layers_that_differ_in_every_declared_feature",
    "test_two_layers_with_other_values",
]


def _run(subject: Subject, features: Sequence[Mapping[str, Any]]) -> None:
    layers = Layers(subject.backend(), features)
    size, phases = layers.engines[0].block_size, subject.form.phases
    contexts = {"a": 2 * size + 1, "b": size, "c": 1}
    for name, context in contexts.items():
        layers.add(name, context + 4)
    if "prefill" in phases:
        layers.step(contexts)
    else:
        for position in range(max(contexts.values())):
            layers.step({name: 1 for name, context in contexts.items() if position < context})
    layers.step(dict.fromkeys(contexts, 1) if "decode" in phases else dict.fromkeys(contexts, 2))
    if len(phases) > 1:
        layers.step({"a": 1, "b": 3, "c": 1})


def _scales(subject: Subject) -> list[dict[str, Any]]:
    return [{"scale": scale * subject.request().head_size ** -0.5} for scale in SCALES]


@covers("layers together")
def test_layers_that_differ_in_every_declared_feature(attncore_subject: Subject) -> None:
    """A layer for every combination of the window, cap, slopes and sinks that are declared; one of another scale."""
    declared = [FEATURES[name] for name in FEATURES if name in attncore_subject.form.features]
    combined = []
    for chosen in product((False, True), repeat=len(declared)):
        given = [features for features, wanted in zip(declared, chosen, strict=True) if wanted]
        combined.append({argument: value for one in given for argument, value in one.items()})
    _run(attncore_subject, [*combined, _scales(attncore_subject)[1]])


@covers("layers together")
def test_two_layers_with_other_values(attncore_subject: Subject) -> None:
    """The same feature with two values, among layers without it: windows of two sizes, two caps, two sets of sinks."""
    first, last = _scales(attncore_subject)
    features: list[dict[str, Any]] = [first, {}]
    for name in FEATURES:
        if name in attncore_subject.form.features:
            features += [dict(FEATURES[name]), dict(OTHER_VALUES[name])]
    _run(attncore_subject, [*features, last])


@covers("layers together")
def test_a_feature_of_the_first_layers_and_not_of_the_last(attncore_subject: Subject) -> None:
    """Two values of one feature, then none, and the other way round: what is planned for the first layer of a step may
    do for all that it hides less from, and for no other."""
    one, other = _scales(attncore_subject)
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(other, one)]
    pairs += [(FEATURES[name], OTHER_VALUES[name]) for name in FEATURES if name in attncore_subject.form.features]
    for first, second in pairs:
        orders: list[list[Mapping[str, Any]]] = [[first, second, {}], [{}, second, first]]
        for features in orders:
            _run(attncore_subject, features)


@covers("layers together")
def test_layers_of_two_cache_groups(attncore_subject: Subject) -> None:
    """One backend for two groups of layers, whose blocks are others: a step has one number in both, and the same
    lengths, by which what is made of a table cannot be told apart."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    if backend.has_plan:
        raise UnsupportedError("it plans, and such a backend serves one group")
    engines = {f"group {number}": Engine(backend, seed=number) for number in range(2)}
    backend.forget_layers()  # each engine forgets those of the one before it
    for name, engine in engines.items():
        engine.impl = backend.impl(name, **engine.features)
    size = backend.config.block_size
    batch = InputBatch(
        max_num_reqs=3, max_model_len=3 * size + 8, groups=[KVCacheGroup(name, size) for name in engines]
    )
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=9 * size + 24)
    prompts = {"a": 2 * size + 1, "b": size, "c": 1}
    for request, tokens in prompts.items():
        for engine in engines.values():
            engine.add(request, tokens + 5)
        batch.add_request(request, {name: engine.batch.block_ids(request) for name, engine in engines.items()})
    for scheduled in (prompts, dict.fromkeys(prompts, 1), {"a": 1, "b": 3, "c": 1}):
        step = builder.build(scheduled)
        for name, engine in engines.items():
            requests = [StepRequest(one, scheduled[str(one)], engine.context(one)) for one in step.req_ids]
            engine.run_step(step.groups[name], requests)
