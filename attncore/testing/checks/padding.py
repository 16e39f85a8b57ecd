"""Padding, of tokens and, as captured graphs need it, of requests."""

from __future__ import annotations

import math

import pytest

from attncore.builder import MetadataBuilder
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.reading_engine import by_every_method
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_graph_batch_of_the_list_builder",
    "test_a_graph_batch_of_the_persistent_builder",
    "test_a_profiling_run_of_the_persistent_builder",
    "test_a_slot_below_0_writes_nothing_where_every_block_is_owned",
    "test_padded_tokens_change_no_block",
]


@covers("padding")
@pytest.mark.parametrize("tokens", [1, 5])
def test_padded_tokens_change_no_block(attncore_subject: Subject, tokens: int) -> None:
    """Tokens of padding have slot -1 and NaN for queries, keys and values: no block that a request may own changes, and
    no number of a request is NaN."""
    engine = Engine(attncore_subject.backend())
    size = engine.block_size
    engine.add("a", max(2 * size, size + 2))
    if "prefill" in engine.phases:
        engine.step({"a": size}, pad_tokens=tokens)
    else:
        engine.fill({"a": size})
    engine.step({"a": 1}, pad_tokens=tokens)
    engine.step({"a": 1}, pad_tokens=tokens)


@covers("padding")
def test_a_slot_below_0_writes_nothing_where_every_block_is_owned(attncore_subject: Subject) -> None:
    """Requests own the whole pool, its last block too, and every slot but one holds a token: that one alone changes."""
    engine = Engine(attncore_subject.backend(), num_blocks=4)
    size = engine.block_size
    engine.free.sort()
    engine.add("a", 2 * size)  # blocks are taken from the end
    engine.add("b", size)
    if engine.num_blocks - 1 not in engine.batch.block_ids("a"):
        raise ConformanceError("the request does not hold the last block, so nothing is tested")
    engine.fill({"a": 2 * size, "b": size - 1})
    engine.step({"b": 1}, pad_tokens=3)


@covers("padding")
@pytest.mark.parametrize("given", ["no cache", "a cache"])
def test_a_profiling_run_of_the_persistent_builder(attncore_subject: Subject, given: str) -> None:
    """Prompts without blocks, whose slots are -1 and whose tables are empty, attend over their own keys, also where a
    cache is given: no block of it is read or changes, by any method. Without writing the keys are given, too."""
    attncore_subject.require_phase("prefill")
    for engine in by_every_method(attncore_subject, given=True, junk=math.nan):
        lengths = {"a": 3, "b": engine.block_size + 1, "c": 1}
        for name, length in lengths.items():
            engine.add(name, length)
        if given == "no cache":
            engine.kv_cache = None
        builder = MetadataBuilder(engine.batch, engine.backend, max_num_batched_tokens=engine.batch.max_model_len)
        metadata = builder.build_profile(lengths.values())
        engine.run_step(metadata, [StepRequest(name, length, 0) for name, length in lengths.items()])


def _decoding(subject: Subject, room: int) -> Engine:
    """An engine with three requests that decode, at the edges of blocks, and blocks for ``room`` further tokens."""
    subject.require_graphs("decode")
    engine = Engine(subject.backend())
    size = engine.block_size
    contexts = {0: 1, 1: size, 2: 2 * size + 1}
    for name, context in contexts.items():
        engine.add(name, context + room)
    engine.fill(contexts)
    return engine


@covers("graph padding")
@pytest.mark.parametrize("padding", [1, 3])
def test_a_graph_batch_of_the_persistent_builder(attncore_subject: Subject, padding: int) -> None:
    """Decodes padded to a captured size: ``query_start_loc`` plateaus, lengths are ``pad_seq_len``, slots -1."""
    engine = _decoding(attncore_subject, room=4)
    pad = {"pad_reqs": padding, "pad_tokens": padding, "pad_seq_len": attncore_subject.form.pad_seq_len}
    engine.step(dict.fromkeys(range(3), 1), **pad)
    engine.step({1: 1}, **{**pad, "pad_reqs": padding + 2, "pad_tokens": padding + 2})  # the same captured size
    engine.step(dict.fromkeys(range(3), 1), **pad)


@covers("graph padding")
@pytest.mark.parametrize("padding", [0, 2])
def test_a_graph_batch_of_the_list_builder(attncore_subject: Subject, padding: int) -> None:
    """Decodes padded by the rules of the first generation: lengths 1, rows of block 0, a table of fixed width."""
    engine = _decoding(attncore_subject, room=2)
    engine.list_step({}, dict.fromkeys(range(3), 1), pad=padding)
    engine.list_step({}, {2: 1}, pad=padding + 2)
