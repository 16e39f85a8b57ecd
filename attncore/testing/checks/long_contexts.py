"""Contexts of thousands of tokens, beyond the lengths at which kernels begin to split a request's keys."""

from __future__ import annotations

from attncore.testing.engines.engine import NUM_BLOCKS, Engine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.subject import Subject

__all__ = ["test_long_chunks_behind_a_context", "test_steps_over_long_contexts"]
CONTEXTS = {"long": 2049, "longer": 3001, "short": 3}
CHUNKS = {"a": (41, 65), "b": (3, 129), "c": (70, 17)}


@covers("long contexts")
def test_steps_over_long_contexts(attncore_subject: Subject) -> None:
    """Decodes after 2,049 and 3,001 tokens beside one after 3; one alone, whose keys are split the most; a chunk."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend(num_heads=2, num_kv_heads=1)
    blocks = sum(-(-(context + 8) // backend.config.block_size) for context in CONTEXTS.values())
    engine = Engine(backend, num_blocks=blocks + 8)
    for name, context in CONTEXTS.items():
        engine.add(name, context + 8)
        engine.fill({name: context})
    engine.step(dict.fromkeys(CONTEXTS, 1))
    engine.step({"longer": 1})
    engine.step({"longer": 5, "long": 1})


@covers("chunked prefill")
def test_long_chunks_behind_a_context(attncore_subject: Subject) -> None:
    """Chunks of more tokens than a tile of queries has, behind contexts that a page does not end with; and beside
    decodes.
    """
    attncore_subject.require_phase("prefill")
    backend = attncore_subject.backend()
    blocks = sum(-(-(context + chunk + 4) // backend.config.block_size) for context, chunk in CHUNKS.values())
    engine = Engine(backend, num_blocks=NUM_BLOCKS + blocks)
    for name, (context, chunk) in CHUNKS.items():
        engine.add(name, context + chunk + 4)
        engine.fill({name: context})
    engine.step({name: chunk for name, (_, chunk) in CHUNKS.items()})
    if "decode" in engine.phases:
        engine.step({"a": 1, "b": 1, "c": 4})
