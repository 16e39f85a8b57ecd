"""Draft trees in captured sizes on the CPU, the stand-in in FlashInfer's place."""

from __future__ import annotations

from functools import partial
from typing import Any

import flashinfer_standin as standin
import numpy as np
import pytest
from attn_flashinfer import captured_trees, trees
from attn_flashinfer.captured_trees import CapturedTrees
from captured_tree_engine import CapturedTreeEngine

from attncore.builder import InputBatch, MetadataBuilder
from attncore.testing.engines import captured_engine
from attncore.testing.harness.errors import ConformanceError

LAYERS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 9, "logits_soft_cap": 1.5},
]


def run(steps: int = 12, tokens: int = 7, **features: Any) -> standin.Recorder:
    """Steps of a layer with ``features`` beside others; ConformanceError where one differs."""
    recorder = standin.Recorder()
    engine = CapturedTreeEngine(standin.backend(recorder), tokens, others=(None, 5, 12), **features)
    for _ in range(steps):
        engine.change()
        engine.replayed()
    return recorder


@pytest.mark.parametrize("features", LAYERS, ids=str)
@pytest.mark.parametrize("tokens", [2, 7])
def test_every_replay_sees_the_trees_of_its_step(tokens: int, features: dict[str, Any]) -> None:
    run(tokens=tokens, **features)
