"""Compares what attention gave for a sample of requests with dense float32 attention over their content.

The cache, the metadata and the backend have no part in what is expected: keys and values are computed again from the
request, the position and the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attncore.replay.checks.sampled_check import SampledCheck
from attncore.replay.token_content import Content, content_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request

CHUNK_PARTS, PART_TOKENS = 3, 16  # of a prompt chunk: the beginning, the middle and the end
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class AttentionCheck(SampledCheck):
    """A comparison is over all layers together; ``windows`` has the sliding window of each, or None."""

    def __init__(
        self,
        content: Content,
        windows: Sequence[int | None],
        dtype: str,
        requests: Sequence[Request],
        settings: Settings,
        result: Verification,
    ) -> None:
        super().__init__(requests, settings.verify_every, settings.seed, result)
        self.content, self.windows, self.dtype = content, windows, dtype
        self.tolerance = TOLERANCE.get(dtype, TOLERANCE["bfloat16"])

    def __call__(self, number: int, step: Step, metadata: StepMetadata, outputs: list[Tensor]) -> None:
        """Check step ``number``; its requests stand as before it."""
        for running, count in self.chosen(step):
            index = metadata.req_ids.index(running.row)
            start = int(metadata.host.query_start_loc[index])
            error = self._error(running, count, [output[start : start + count] for output in outputs])
            self.book(
                error,
                self.tolerance,
                f"step {number}, request in row {running.row}, tokens from {running.computed}: differs from dense "
                f"attention by {error:.3g}, {self.tolerance:g} allowed",
            )

    def _error(self, running: RunningRequest, count: int, outputs: list[Tensor]) -> float:
        """The largest difference over all layers of the tokens compared; NaN where any output is NaN."""
        import torch

        from attncore.dense import dense_attention

        context, dtype = running.computed, getattr(torch, self.dtype)
        ids = content_ids(running.request, 0, context + count)
        positions = np.arange(context + count, dtype=np.int64)
        errors = []
        for layer, (window, output) in enumerate(zip(self.windows, outputs, strict=True)):
            if len(output) != count:
                return float("nan")  # the metadata gives this request another number of tokens
            # Rounded as the backend gets them: only its arithmetic is compared.
            query, key, value = (
                torch.from_numpy(part).to(dtype).float() for part in self.content.tokens(ids, positions, layer)
            )
            for first, last in parts(count):
                end = context + last
                dense = dense_attention(
                    query[context + first : end], key[:end], value[:end], scale=self.content.scale,
                    sliding_window=window,
                )  # fmt: skip
                errors.append((output[first:last].cpu().float() - dense).abs().max())
        return float(torch.stack(errors).max())


def parts(count: int) -> list[tuple[int, int]]:
    """The tokens of a chunk of ``count`` tokens that are compared, as (first, last + 1)."""
    if count <= CHUNK_PARTS * PART_TOKENS:
        return [(0, count)]
    starts = [part * (count - PART_TOKENS) // (CHUNK_PARTS - 1) for part in range(CHUNK_PARTS)]
    return [(start, start + PART_TOKENS) for start in starts]
