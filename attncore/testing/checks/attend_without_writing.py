"""``forward(..., write=False)`` and ``write_cache``: for layers that share a cache, and engines that write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attncore.testing.engines.reading_engine import WRITERS, ReadingCrossEngine, ReadingEngine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_cross_layer_attends_without_writing",
    "test_a_layer_attends_without_writing",
    "test_a_layer_of_the_list_builder_attends_without_writing",
    "test_chunks_of_the_list_builder_attend_without_writing",
    "test_log_sum_exp_without_writing",
    "test_padded_decodes_attend_without_writing",
]


@covers("attend without writing")
@pytest.mark.parametrize("nan", [False, True], ids=["None", "NaN"])
@pytest.mark.parametrize("written_by", WRITERS)
def test_a_layer_attends_without_writing(attncore_subject: Subject, written_by: str, nan: bool) -> None:
    """Keys and values are in the cache: every row has a table, so ``key`` and ``value`` are not read (None, or NaN),
    and not one byte of the cache changes. Plain, and with a window where one is declared."""
    heads = {"num_heads": 4, "num_kv_heads": 2} if _may_be_grouped(attncore_subject) else {}
    backend = attncore_subject.backend(**heads)
    _run(attncore_subject, ReadingEngine(backend, written_by=written_by, nan=nan))
    if "sliding_window" in attncore_subject.form.features:
        _run(attncore_subject, ReadingEngine(backend, written_by=written_by, nan=nan, **FEATURES["sliding_window"]))


@covers("attend without writing")
def test_log_sum_exp_without_writing(attncore_subject: Subject) -> None:
    """``forward_with_lse(..., write=False)``, where the spec declares ``lse``."""
    attncore_subject.require("lse")
    _run(attncore_subject, ReadingEngine(attncore_subject.backend(), written_by="another layer", with_lse=True))


@covers("attend without writing")
def test_a_layer_of_the_list_builder_attends_without_writing(attncore_subject: Subject) -> None:
    """Prompts that have no table bring their keys; decodes have one."""
    attncore_subject.require_phase("prefill", "decode")
    engine = ReadingEngine(attncore_subject.backend(), written_by="write_cache", given=True)
    for name, length in enumerate((3, engine.block_size + 1)):
        engine.add(name, length + 2)
    try:
        engine.list_step({0: 3, 1: engine.block_size + 1}, {})
    except ConformanceError as error:
        words = f"{error}; prompts have no table here, and bring their keys with write=False too"
        raise ConformanceError(words, error.max_error) from None
    engine.list_step({}, {0: 1, 1: 1})


@covers("attend without writing")
@pytest.mark.parametrize("nan", [False, True], ids=["None", "NaN"])
def test_chunks_of_the_list_builder_attend_without_writing(attncore_subject: Subject, nan: bool) -> None:
    """Prompts that have context have a table, too: their own keys are in the cache."""
    attncore_subject.require_phase("prefill", "decode")
    engine = ReadingEngine(attncore_subject.backend(), written_by="write_cache", nan=nan)
    for name, context in enumerate((3, engine.block_size, 2)):
        engine.add(name, context + 7)
        engine.fill({name: context})
    with _of(engine):
        engine.list_step({0: 5, 1: 2}, {2: 1})
        engine.list_step({0: 1}, {2: 1}, hit=True)


@covers("attend without writing")
def test_padded_decodes_attend_without_writing(attncore_subject: Subject) -> None:
    """Decodes that are padded as for a captured graph."""
    attncore_subject.require_graphs("decode")
    engine = ReadingEngine(attncore_subject.backend(), written_by="write_cache")
    for name, context in enumerate((1, engine.block_size)):
        engine.add(name, context + 1)
    engine.fill({0: 1, 1: engine.block_size})
    engine.step({0: 1, 1: 1}, pad_reqs=2, pad_tokens=2, pad_seq_len=attncore_subject.form.pad_seq_len)


@covers("attend without writing")
@pytest.mark.parametrize("written_by", WRITERS)
def test_a_cross_layer_attends_without_writing(attncore_subject: Subject, written_by: str) -> None:
    """A cross layer, in the step that brings an encoder's keys and in one that does not."""
    attncore_subject.require("encoder_decoder")
    attncore_subject.require_phase("prefill", "decode")
    engine = ReadingCrossEngine(attncore_subject.backend(), written_by=written_by)
    for name, length in enumerate((1, engine.block_size + 1)):
        engine.add(name, length)
    with _of(engine):
        engine.cross_step({0: 3, 1: 2})
        engine.cross_step({0: 1, 1: 1})


def _may_be_grouped(subject: Subject) -> bool:
    form = subject.form
    return not form.mla_only and (form.max_group_size is None or form.max_group_size >= 2)


def _run(subject: Subject, engine: ReadingEngine) -> None:
    with _of(engine):
        run_batch(engine, subject.around_a_block(engine.block_size))


@contextmanager
def _of(engine: ReadingEngine) -> Iterator[None]:
    """Errors say who has written, and which method the layer raised in."""
    try:
        yield
    except UnsupportedError:
        raise
    except ConformanceError as error:
        raise ConformanceError(f"written by {engine.written_by}: {error}", error.max_error) from error
    except Exception as error:
        method = "forward_with_lse" if engine.with_lse else "forward"
        what = f"{method}(..., write=False), whose key and value may be None, where {engine.written_by} has written"
        raise ConformanceError(f"{what}: {told(error)}") from error
