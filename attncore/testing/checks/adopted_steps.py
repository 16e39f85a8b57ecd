"""Steps that are made of an engine's own tensors, as serving engines hand them over: ``AdoptedSteps``."""

from __future__ import annotations

import itertools

import torch

from attncore.testing.engines.adopting_builder import AdoptingBuilder, AdoptingEngine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import NUM_BLOCKS
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_captured_adopted_steps", "test_rows_in_the_order_of_an_engine"]
CAPTURED_STEPS = 12
LONG = 600  # keys: more than a kernel reads in one part


@covers("adopted steps")
def test_rows_in_the_order_of_an_engine(attncore_subject: Subject) -> None:
    """Rows as the engine gives them: decodes first, and behind chunks, where a row of one token is a prefill; and with
    rows without tokens before them."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    contexts = {"a": 2 * size + 1, "b": size, "c": 1, "d": size - 1, "long": LONG}
    room = {name: context + 5 * size + 32 for name, context in contexts.items()}
    num_blocks = max(NUM_BLOCKS + LONG // size, 1 + sum(-(-tokens // size) for tokens in room.values()))
    engine = AdoptingEngine(backend, num_blocks=num_blocks)
    for name, tokens in room.items():
        engine.add(name, tokens)
    engine.fill(contexts)
    each = dict.fromkeys(contexts, 1)
    for turned, idle in itertools.product((False, True), repeat=2):
        for scheduled in (each, {**each, "b": 3, "d": size + 2}, {"a": 1}, {"c": 2, "a": 1}):
            engine.step(scheduled, turned=turned, idle=idle)


@covers("adopted steps")
def test_captured_adopted_steps(attncore_subject: Subject) -> None:
    """Captured sizes with an engine's own padding: length 0, slot -1, row 0 of the table. Elsewhere than on a CUDA
    device of backends that read nothing on the host: its arrays are others in each step, and a stand-in for a graph has
    those of the capture."""
    attncore_subject.require_graphs("prefill", "decode")
    backend = attncore_subject.backend()
    if torch.device(backend.config.device).type != "cuda" and attncore_subject.form.host_needs:
        raise UnsupportedError(
            f"the backend runs on {backend.config.device}, where no graph can be captured, and reads fields on the "
            "host, of which a stand-in for a graph has those of the capture"
        )
    engine = CapturedEngine(backend, 1, make_builder=AdoptingBuilder)
    for _ in range(CAPTURED_STEPS):
        engine.change()
        engine.replayed()
