"""Log-sum-exp, where the spec declares it: what partial outputs are merged by."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from attncore.builder import CommonAttentionMetadata, ContextParallel, InputBatch, MetadataBuilder
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.compare import StepRequest, check_output
from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.encoder_engine import EncoderEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.requests import History
from attncore.testing.engines.run_batches import run_around_a_block, run_batch, run_drawn_batches
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES

__all__ = [
    "test_a_rank_decodes_over_the_keys_it_keeps",
    "test_log_sum_exp_is_float32_in_every_dtype",
    "test_log_sum_exp_of_captured_sizes",
    "test_log_sum_exp_of_cross_attention",
    "test_log_sum_exp_of_encoders",
    "test_log_sum_exp_over_random_batches",
    "test_log_sum_exp_with_features",
    "test_log_sum_exp_with_the_output_where_it_is_asked",
]


@covers("lse")
def test_log_sum_exp_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Natural logarithms, float32 (tokens, heads), of every token of mixed batches."""
    attncore_subject.require("lse")
    run_drawn_batches(attncore_subject, attncore_subject.backend(), attncore_examples, with_lse=True)


@covers("lse")
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exp_is_float32_in_every_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Parts are merged by it: in 16 bits it would round their weights."""
    attncore_subject.require("lse")
    if dtype not in attncore_subject.form.dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(dtype=dtype)
    run_around_a_block(attncore_subject, backend, with_lse=True)
    # Scores far from 0: logarithms of 4 to 20, of which 16 bits would keep two or three decimals.
    run_around_a_block(attncore_subject, backend, with_lse=True, scale=4 * backend.config.head_size**-0.5)


@covers("lse")
def test_log_sum_exp_with_features(attncore_subject: Subject) -> None:
    """Window, soft cap and slopes act before it; a sink is part of the sum. Each that is declared, then all."""
    attncore_subject.require("lse")
    backend = attncore_subject.backend()
    declared = [FEATURES[name] for name in FEATURES if name in attncore_subject.form.features]
    together: dict[str, Any] = {argument: value for one in declared for argument, value in one.items()}
    for features in (*declared, together):
        run_around_a_block(attncore_subject, backend, with_lse=True, **features)


@covers("lse")
def test_log_sum_exp_of_captured_sizes(attncore_subject: Subject, attncore_captured_steps: int) -> None:
    """Decodes in graphs, as those of ranks are, whose parts one kernel merges behind them."""
    attncore_subject.require("lse")
    attncore_subject.require_graphs("prefill", "decode")
    engine = CapturedEngine(attncore_subject.backend(), 1, with_lse=True)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


@covers("lse")
def test_log_sum_exp_with_the_output_where_it_is_asked(attncore_subject: Subject) -> None:
    """``forward_with_lse`` fills the ``output`` that it is given, and returns that."""
    attncore_subject.require("lse")
    backend = attncore_subject.backend()
    engine = Engine(backend, with_lse=True)
    forward = engine.impl.forward_with_lse

    def into(
        query: Tensor, key: Tensor, value: Tensor | None, kv_cache: Any, metadata: CommonAttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        output = query.new_full((*query.shape[:2], backend.config.head_size_v or query.shape[2]), torch.nan)
        answer = forward(query, key, value, kv_cache, metadata, output)
        check_output(answer[0], output, "forward_with_lse")
        return answer

    engine.impl.forward_with_lse = into  # type: ignore[method-assign, assignment]
    run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))


@covers("lse")
def test_log_sum_exp_of_encoders(attncore_subject: Subject) -> None:
    """Of layers that keep nothing."""
    for feature in ("lse", "encoder"):
        attncore_subject.require(feature)
    backend = attncore_subject.backend()
    for kind in ("encoder", "encoder_only"):
        EncoderEngine(backend, kind, with_lse=True).encode([1, 9, backend.config.block_size])


@covers("lse")
def test_log_sum_exp_of_cross_attention(attncore_subject: Subject) -> None:
    """Infinite where a request has no encoder tokens: the part has no weight then."""
    for feature in ("lse", "encoder_decoder"):
        attncore_subject.require(feature)
    attncore_subject.require_phase("prefill", "decode")
    engine = CrossEngine(attncore_subject.backend(), with_lse=True)
    for name, length in enumerate((5, 0, 2 * engine.block_size + 1)):
        engine.add(name, length)
    engine.cross_step({0: 2, 1: 3, 2: 1})
    engine.cross_step({0: 1, 1: 1, 2: 1})


@covers("lse")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("interleave", ["1", "block"])
def test_a_rank_decodes_over_the_keys_it_keeps(attncore_subject: Subject, rank: int, interleave: str) -> None:
    """Two ranks share each request's keys (decode context parallelism). Where the other keeps the new token its slot is
    -1, and the query sees the ``seq_lens`` keys in this rank's cache; there may be none."""
    attncore_subject.require("lse")
    attncore_subject.require_phase("decode")
    engine = Engine(attncore_subject.backend(), with_lse=True)
    size = engine.block_size
    mine = ContextParallel(2, rank, size, 1 if interleave == "1" else size)
    contexts = {"a": 1, "b": 2, "c": size, "d": 2 * size, "e": 3 * size + 1}
    kept = {name: int(mine.seq_lens([context])[0]) for name, context in contexts.items()}
    batch = InputBatch(max_num_reqs=len(contexts), max_model_len=8 * size, block_size=2 * size)
    for name, context in contexts.items():
        engine.add(name, kept[name] + size)
        batch.add_request(name, engine.batch.block_ids(name), num_computed_tokens=context)
    engine.fill(kept)  # as if its own were all there are: where they lie in the cache is the same
    engine.causal = False  # the query comes after all keys
    built = MetadataBuilder(batch, max_num_batched_tokens=len(contexts)).build()
    metadata = planned(engine.backend, mine.metadata(built))
    tensors = engine.drawn.query_key_value(len(contexts))
    others = ContextParallel(2, 1 - rank, size, mine.interleave)
    requests, expected = [], []
    written: dict[Hashable, History] = {}
    misaligned: dict[Hashable, History] = {}
    as_the_other: dict[Hashable, History] = {}
    for i, name in enumerate(built.req_ids):
        is_mine = metadata.host.slot_mapping[i] >= 0
        whole = engine.history[name].extended(*(new[i : i + 1] for new in tensors[1:]))
        if is_mine and (j := len(misaligned)) != i:
            misaligned[name] = engine.history[name].extended(*(new[j : j + 1] for new in tensors[1:]))
        elif is_mine:
            misaligned[name] = whole
        engine.history[name] = seen = whole if is_mine else engine.history[name]
        if not is_mine:
            written[name] = whole
        as_the_other[name] = _of_length(seen, int(others.seq_lens([contexts[name] + 1])[0]), engine.junk)
        expected.append(engine.dense(tensors[0][i : i + 1], *seen))
        requests.append(StepRequest(name, 1, kept[name]))
    engine.suspects = [
        ("the slot -1 were written: the step's own key was seen, which another rank keeps", written),
        ("slots of -1 were left out and their keys not: those behind them are in each other's slots", misaligned),
        (f"rank {rank} read as many keys as rank {1 - rank} keeps", as_the_other),
    ]
    try:
        answer = engine.checked_forward(tensors, metadata, metadata.host.slot_mapping)
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(
            f"rank {rank} of 2, in a step whose seq_lens are {metadata.host.seq_lens.tolist()}: {told(error)}; a rank "
            "may keep no key of a request (the output is 0, the logarithm infinite), or not the newest one (slot -1)"
        ) from error
    engine.compare(answer, expected, requests, tensors[0])


def _of_length(history: History, length: int, junk: float) -> History:
    """The first ``length`` keys and values; beyond them what stands in slots without a token."""
    missing = max(0, length - len(history.keys))
    more = (part.new_full((missing, *part.shape[1:]), junk) for part in history)
    return history.extended(*more).first(length)
