"""Compares the logits of a sample of requests with those of the model alone: eager attention, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.replay.checks.sampled_check import SampledCheck
from attncore.replay.layers.model_from_config import data_alone
from attncore.replay.model_error import ModelError, errors_as_model_errors, memory_error_as_model_error
from attncore.replay.token_content import content_ids, token_ids
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncore.abstract import AttentionBackend
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of the largest logit: how far a logit may be from the model's own."""


class ModelCheck(SampledCheck):
    """A comparison is of the logits of one request's last token in one step."""

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        vocab_size: int,
        requests: Sequence[Request],
        settings: Settings,
        result: Verification,
    ) -> None:
        super().__init__(requests, settings.verify_every, settings.seed, result)
        self.model, self.backend, self.vocab_size = model, backend, vocab_size
        self.tolerance = TOLERANCE[backend.config.dtype]

    def __call__(self, number: int, step: Step, metadata: StepMetadata, outputs: list[Tensor]) -> None:
        """Check step ``number``; its requests stand as before it."""
        for running, count in self.chosen(step):
            length = running.computed + count
            expected = self._eager_logits(running, length)
            found = outputs[0][metadata.req_ids.index(running.row)].float()
            error, allowed = float((found - expected).abs().max()), self.tolerance * float(expected.abs().max())
            self.book(
                error,
                allowed,
                f"step {number}, request in row {running.row}, {counted(length, 'token')}: a logit differs from the "
                f"model's own by {error:.3g}, {allowed:.3g} allowed",
            )

    def _eager_logits(self, running: RunningRequest, length: int) -> Tensor:
        ids = token_ids(content_ids(running.request, 0, length), np.arange(length), self.vocab_size)
        with (
            data_alone(),
            memory_error_as_model_error(
                f"model: the check of {counted(length, 'token')} by eager attention",
                "replay shorter requests, or check fewer with --verify-every",
            ),
            errors_as_model_errors(f"model: the check of {counted(length, 'token')} by its own attention"),
            EagerAttention(self.model),
            torch.inference_mode(),
        ):
            tokens = self.backend.from_host(ids)[None]
            logits: Tensor = self.model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        if not logits.isfinite().all():
            raise ModelError(
                f"model: its own logits after {counted(length, 'token')} are not finite, so that nothing can be "
                "compared with them; correct the configuration"
            )
        return logits


class EagerAttention:
    """A context in which the model's attention is its own, eager one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_attn_implementation("eager")

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("attncore")
