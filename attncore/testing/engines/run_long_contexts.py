"""A few steps over more keys than one part of a kernel reads, by every method of a layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from attncore.testing.engines.adopting_builder import AdoptingEngine
from attncore.testing.engines.every_method_engine import EveryMethodEngine
from attncore.testing.harness.errors import RefusedStepError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.testing.engines.engine import Engine

SPREAD = 2.0
"""Scores are as many times those of the usual scale: so that some of a thousand keys still count."""


class Lengths(NamedTuple):
    """The keys of a request that decodes; those of one that has a chunk after them, and the tokens of that."""

    decode: int
    context: int
    chunk: int


LONGEST = Lengths(1100, 700, 300)
LONGER = Lengths(530, 330, 210)
"""Beyond 512 keys, at which kernels begin to split them, and a chunk of more than 200 tokens: for every setting."""


def run_long_contexts(
    backend: AttentionBackend, lengths: Lengths = LONGER, *, make: Callable[..., Engine] = EveryMethodEngine,
    **given: Any,
) -> None:  # fmt: skip
    """Decodes, a chunk, several tokens (drafts, where they are declared) and, but for adopted steps, steps of the list
    builder, of an engine that is made with ``given``.
    """
    contexts = {"long": lengths.decode, "chunk": lengths.context, "short": 3}
    room = lengths.chunk + 16
    num_blocks = sum(-(-(context + room) // backend.config.block_size) for context in contexts.values()) + 8
    num_blocks += -(-lengths.chunk // backend.config.block_size)
    has_drafts = backend.spec is not None and "multi_token_decode" in backend.spec.features
    given = {"scale": SPREAD * backend.config.head_size**-0.5, **given}
    engine = make(backend, num_blocks=num_blocks, decode_threshold=2 if has_drafts else 1, **given)
    for name, context in contexts.items():
        engine.add(name, context + room)
    engine.fill(contexts)
    each = dict.fromkeys(contexts, 1)
    engine.step(each)
    engine.step({**each, "chunk": lengths.chunk})
    engine.step({"long": 1})
    engine.step({"long": 2, "short": 1})
    if isinstance(engine, AdoptingEngine):
        return
    engine.add("plain", lengths.chunk)
    with suppress(RefusedStepError):  # a row of its own says so
        engine.list_step({"plain": lengths.chunk}, {})
        engine.list_step({}, each)
        engine.list_step({"chunk": 5}, {"long": 1, "short": 1})
