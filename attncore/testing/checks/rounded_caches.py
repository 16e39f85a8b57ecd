"""Accuracy over an fp8 cache: keys and values that it has to round, against dense float32 attention over exact ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from attncore.abstract import AttentionBackend
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.random_tensors import scale_of
from attncore.testing.engines.rounded_cache import ROUNDING, squared_bounds, why_beyond
from attncore.testing.engines.run_batches import run_batch, run_decodes_alone
from attncore.testing.engines.tolerances import TOLERANCES
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_rounding_of_an_fp8_cache"]
SCALES = {"k_scale": 3.0, "v_scale": 0.15}
"""No powers of two: numbers are rounded where no grid of ours has them."""
OF_ANOTHER_LAYER = 2.0
"""How many times as large the scales of the backend's other layer are."""


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("kv_cache_dtype", sorted(ROUNDING))
def test_rounding_of_an_fp8_cache(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """Keys and values that an fp8 cache rounds, with the layer's own scales: the output is off by what the format says,
    propagated through the softmax, and no more. Scales of another layer, or those of this one applied twice, are."""
    if kv_cache_dtype not in attncore_subject.form.kv_cache_dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_dtype=kv_cache_dtype)
    scales = SCALES if "kv_scales" in attncore_subject.form.features else {}
    if backend.config.use_mla and scales:
        scales = {"k_scale": SCALES["k_scale"]}
    engine = _RoundedEngine(backend, **scales)
    others = {name: OF_ANOTHER_LAYER * one for name, one in scales.items()}
    backend.impl("layers.1", **{**engine.features, **others})  # what it leaves on the backend is not this layer's
    run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))
    run_decodes_alone(engine)


class _RoundedEngine(Engine):
    """An engine whose keys and values no cache holds exactly; outputs may be off as ``rounded_cache`` derives it."""

    def __init__(self, backend: AttentionBackend, **features: Any) -> None:
        super().__init__(backend, grid=False, **features)
        self._squared: list[Tensor] = []

    def expected(
        self, tensors: tuple[Tensor, Tensor, Tensor], requests: Iterable[StepRequest]
    ) -> list[tuple[Tensor, Tensor]]:
        requests = list(requests)
        found = super().expected(tensors, requests)
        latent = self.config.use_mla
        scales = {name: scale_of(self.features, name) for name in ("k_scale", "v_scale")}
        if latent:
            scales["v_scale"] = scales["k_scale"]
        self._squared, start = [], 0
        for one in requests:
            query = tensors[0][start : start + one.tokens]
            start += one.tokens
            self._squared.append(
                squared_bounds(
                    ROUNDING[self.config.kv_cache_dtype], query, *self.history[one.name],
                    scale=self.features["scale"], shared=latent, **scales,
                )
            )  # fmt: skip
        return found

    def _compare(self, answer: Tensor, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest]) -> None:
        wanted = torch.cat([output for output, _ in expected])
        error = (answer[: len(wanted)].float() - wanted).abs()
        self.max_error = max(self.max_error, float(error.max()))
        # What the model's dtype rounds: weights, and the output.
        others = TOLERANCES[self.config.dtype] * (1 + wanted.abs())
        if why := why_beyond(error, torch.cat(self._squared), others):
            settings = ", ".join(f"{name} {given:g}" for name, given in self.features.items())
            raise ConformanceError(
                f"the output differs from dense float32 attention by more than a cache of {self.config.kv_cache_dtype} "
                f"rounds keys and values: {why} [{settings}] [{'; '.join(map(str, requests))}]",
                float(error.max()),
            )
