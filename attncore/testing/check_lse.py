"""Log-sum-exp, where the spec declares it: what partial outputs are merged by."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from attncore.testing.capability import covers, explore, rows
from attncore.testing.check_features import FEATURES
from attncore.testing.encoder_engine import CrossEngine, EncoderEngine
from attncore.testing.engine import Engine, run_rows
from attncore.testing.errors import ConformanceError
from attncore.testing.subject import Subject

__all__ = [
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
    backend, phases = attncore_subject.backend(), attncore_subject.form.phases
    kinds: dict[str, Any] = {} if len(phases) > 1 else {"contexts": True, "decode": "decode" in phases}

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        run_rows(Engine(backend, seed=seed, with_lse=True), batch)

    explore(check, attncore_examples, batch=rows(backend.config.block_size, **kinds), seed=st.integers(0, 999))


@covers("lse")
def test_log_sum_exp_with_features(attncore_subject: Subject) -> None:
    """Window, soft cap and slopes act before it; a sink is part of the sum. Each that is declared, then all."""
    attncore_subject.require("lse")
    backend = attncore_subject.backend(num_heads=4, num_kv_heads=2)
    declared = [FEATURES[name] for name in FEATURES if name in attncore_subject.form.features]
    together: dict[str, Any] = {argument: value for one in declared for argument, value in one.items()}
    for features in (*declared, together):
        batch = attncore_subject.around_a_block(backend.config.block_size)
        run_rows(Engine(backend, with_lse=True, **features), batch)


@covers("lse")
def test_log_sum_exp_with_the_output_where_it_is_asked(attncore_subject: Subject) -> None:
    """``forward_with_lse`` fills the ``output`` that it is given, and returns that."""
    attncore_subject.require("lse")
    backend = attncore_subject.backend()
    engine = Engine(backend, with_lse=True)
    forward, seen = engine.impl.forward_with_lse, []

    def into(query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any) -> Any:
        output = torch.full_like(query[..., : backend.config.head_size_v], float("nan"))
        answer = forward(query, key, value, kv_cache, metadata, output)
        seen.append(answer[0].data_ptr() == output.data_ptr())
        return answer

    engine.impl.forward_with_lse = into  # type: ignore[method-assign, assignment]
    run_rows(engine, attncore_subject.around_a_block(backend.config.block_size))
    if not all(seen):
        raise ConformanceError("forward_with_lse was given an output and returned another tensor")


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
