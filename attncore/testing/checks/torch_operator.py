"""The layer through the torch operator ``attncore::attention``, as compiled models call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncore.ops.forward_context import forward_context
from attncore.ops.operator import attention
from attncore.testing.engines.compare import check_output, differs
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_the_layer_as_a_torch_operator"]


@covers("torch operator")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_layer_as_a_torch_operator(attncore_subject: Subject, compiled: bool) -> None:
    """A step by ``forward`` and by the operator, called or traced without a break: the same output, the same cache."""
    if compiled and torch._dynamo.config.disable:  # torch says so of every layer, whoever has written it
        raise UnsupportedError("torch.compile is switched off here (TORCH_COMPILE_DISABLE)")
    engine = Engine(attncore_subject.backend())
    names = {"a": 3, "b": engine.block_size + 1}
    for name, context in names.items():
        engine.add(name, context + 1)
    engine.fill(names)
    metadata = planned(engine.backend, engine.builder.build(dict.fromkeys(names, 1)))
    config = engine.config
    query, key, value = engine.on_device(engine.drawn.query_key_value(metadata.num_tokens))
    given: Any = None if config.use_mla else value
    before = engine.cache_view.snapshot()
    # The operator gives each layer the output to fill, so that one which does not is named as such here.
    expected = query.new_full((*query.shape[:2], config.head_size_v or config.head_size), torch.nan)
    check_output(engine.impl.forward(query, key, given, engine.kv_cache, metadata, expected), expected)
    wanted = engine.cache_view.snapshot()

    def model(query: Any, key: Any, value: Any, kv_cache: Any) -> Any:
        return attention(query * 1, key, value, kv_cache, layer_name="layers.0", head_size_v=config.head_size_v)

    engine.cache_view.restore(before)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.inference_mode(), forward_context(metadata, {"layers.0": engine.impl}):
        found = run(query, key, given, engine.kv_cache)
    if differs(found.cpu(), expected.cpu()) > engine.tolerance:
        raise ConformanceError("through the operator attncore::attention forward gave another output")
    for new, old in zip(engine.cache_view.snapshot(), wanted, strict=True):
        if not torch.equal(new, old):
            raise ConformanceError("through the operator attncore::attention forward left another cache")
