"""Contexts of thousands of tokens, beyond the lengths at which kernels begin to split a request's keys."""

from __future__ import annotations

from attncore.testing.engines.engine import Engine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.subject import Subject

__all__ = ["test_steps_over_long_contexts"]
CONTEXTS = {"long": 2049, "longer": 3001, "short": 3}


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
