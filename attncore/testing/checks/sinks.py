"""Sinks that are set after the layer was made, as with other weights: seen by the next step, and by captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch, run_decodes_alone
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, OTHER_VALUES, of_heads
from attncore.testing.harness.errors import ConformanceError
from attncore.testing.harness.subject import Subject

__all__ = ["test_captured_sizes_see_sinks_that_are_set", "test_sinks_set_after_the_layer_is_made"]

BEFORE, AFTER = FEATURES["sinks"], OTHER_VALUES["sinks"]


@covers("sinks set later")
@pytest.mark.parametrize("kind", ["numbers", "tensor"])
def test_sinks_set_after_the_layer_is_made(attncore_subject: Subject, kind: str) -> None:
    """``set_sinks`` counts from the next step on, of a layer that has attended with others; and once more."""
    attncore_subject.require("sinks")
    backend = attncore_subject.backend()
    engine = Engine(backend, **_given(kind, BEFORE))
    heads = backend.config.num_heads
    other = backend.impl("layers.1", **of_heads({**engine.features, **_given(kind, BEFORE)}, heads))
    batch = attncore_subject.around_a_block(backend.config.block_size)
    run_batch(engine, batch)
    for earlier, wanted in ((BEFORE, AFTER), (AFTER, BEFORE)):
        for name in list(engine.batch.req_ids):
            engine.remove(name)
        _set(engine, kind, earlier, wanted)
        run_batch(engine, batch)
        run_decodes_alone(engine)
    _set(engine, kind, BEFORE, AFTER)
    kept, made_with = (
        torch.as_tensor(given, dtype=torch.float32).cpu() for given in (other.sinks, BEFORE["sinks"][:heads])
    )
    if not torch.allclose(kept, made_with, rtol=1e-2):
        raise ConformanceError("set_sinks changed the sinks of another layer, which was made with the same")


@covers("sinks set later")
def test_captured_sizes_see_sinks_that_are_set(attncore_subject: Subject) -> None:
    """Decodes that were captured before ``set_sinks`` are replayed with the sinks that it set."""
    attncore_subject.require("sinks")
    attncore_subject.require_graphs("prefill", "decode")
    backend = attncore_subject.backend()
    engine = CapturedEngine(backend, 1, **_given("tensor", BEFORE))
    _set(engine, "tensor", BEFORE, AFTER)
    for _ in range(8):
        engine.change()
        engine.replayed()


def _given(kind: str, features: Any) -> dict[str, Any]:
    """The sinks as a layer is given them: of a model's parameter in its dtype."""
    return dict(features) if kind == "numbers" else {"sinks": torch.tensor(features["sinks"], dtype=torch.bfloat16)}


def _set(engine: Engine, kind: str, earlier: Any, wanted: Any) -> None:
    earlier, wanted = (of_heads(given, engine.config.num_heads) for given in (earlier, wanted))
    engine.impl.set_sinks(_given(kind, wanted)["sinks"])
    engine.features.update(wanted)
    engine.siblings = [("the layer before set_sinks", {**engine.features, **earlier})]
