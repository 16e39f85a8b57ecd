"""Adopted steps: random batches, eager and in captured sizes, whose metadata is made of an engine's own tensors."""

import os

import attncore
from attncore.testing.engines.adopting_builder import AdoptingBuilder
from attncore.testing.engines.captured_engine import CapturedEngine

ON_GPU = os.environ["ATTNCORE_ROCM_DEV_DEVICE"] == "cuda"


def test_random_batches_eager_and_captured():
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16", "block_size": 16}
    engine = CapturedEngine(attncore.select(**request, backend="rocm").create(), 1, make_builder=AdoptingBuilder)
    for _ in range(300 if ON_GPU else 3):
        engine.change()
        engine.replayed()
