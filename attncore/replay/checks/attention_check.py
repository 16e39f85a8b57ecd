"""Compares what attention gave for a sample of requests with dense float32 attention over their content.

The cache, the metadata and the backend have no part in what is expected: keys and values are computed again from the
request, the position and the layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.replay.layers.token_content import content_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncore.replay.layers.attention_layers import AttentionLayers
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.cache_blocks import RunningRequest
    from attncore.replay.scheduling.scheduler import Step
    from attncore.replay.traces.trace import Request

DECODE_STRIDE = 8  # of a sampled request, one decode in so many
CHUNK_PARTS, PART_TOKENS = 3, 16  # of its prompt chunks: the beginning, the middle and the end
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class DenseCheck:
    """Checks the first request and a random one in ``every``: parts of all its prompt chunks, its first and last decode
    and one decode in ``DECODE_STRIDE``. A comparison is one request in one step, all layers together."""

    def __init__(
        self, layers: AttentionLayers, requests: Sequence[Request], every: int, seed: int, result: Verification
    ) -> None:
        self.layers = layers
        self.result = result
        self.tolerance = TOLERANCE.get(layers.dtype, TOLERANCE["bfloat16"])
        drawn = np.random.default_rng((seed, 1)).random(len(requests)) < 1 / every
        self.sampled = {request.row for request, chosen in zip(requests, drawn, strict=True) if chosen}
        self.sampled.add(requests[0].row)
        result.max_abs_error = 0.0

    def __call__(self, number: int, step: Step, metadata: Any, outputs: list[Any]) -> None:
        """Checks step ``number``; its requests stand as before it."""
        for running, count in chosen_rows(step, self.sampled):
            index = metadata.req_ids.index(running.row)
            start = int(metadata.host.query_start_loc[index])
            error = self._error(running, count, [output[start : start + count] for output in outputs])
            self.result.checked += 1
            # A comparison with NaN is false: what is not a number fails too.
            if not error <= self.tolerance:
                self.result.fail(
                    f"step {number}, request in row {running.row}, tokens from {running.computed}: differs from dense "
                    f"attention by {error:.3g}, {self.tolerance:g} allowed"
                )
            if error < float("inf"):
                self.result.max_abs_error = max(self.result.max_abs_error or 0.0, error)

    def _error(self, running: RunningRequest, count: int, outputs: list[Any]) -> float:
        """The largest difference over all layers of the rows compared; NaN where any output is NaN."""
        import torch

        from attncore.dense import dense_attention

        layers, context = self.layers, running.computed
        dtype = getattr(torch, layers.dtype)
        ids = content_ids(running.request, 0, context + count)
        positions = np.arange(context + count, dtype=np.int64)
        errors = []
        for layer, output in enumerate(outputs):
            if len(output) != count:
                return float("nan")  # the metadata gives this request another number of tokens
            # Rounded as the backend gets them: only its arithmetic is compared.
            query, key, value = (
                torch.from_numpy(part).to(dtype).float() for part in layers.content.tokens(ids, positions, layer)
            )
            for first, last in parts(count):
                end = context + last
                dense = dense_attention(
                    query[context + first : end], key[:end], value[:end], scale=layers.scale,
                    sliding_window=layers.windows[layer],
                )  # fmt: skip
                errors.append((output[first:last].cpu().float() - dense).abs().max())
        return float(torch.stack(errors).max())


def chosen_rows(step: Step, sampled: set[int]) -> Iterator[tuple[RunningRequest, int]]:
    """The requests of ``sampled`` that are checked in a step, with the tokens that they keep of it."""
    for running in step.decodes:
        if running.row not in sampled:
            continue
        new = 1 + step.draft(running).accepted  # what comes of drafts that are rejected is read by nobody
        if any(
            generated % DECODE_STRIDE == 1 or generated + 1 == running.request.output_tokens
            for generated in range(running.generated, running.generated + new)
        ):
            yield running, new
    for running, count in step.prefills:
        if running.row in sampled:
            yield running, count


def parts(count: int) -> list[tuple[int, int]]:
    """The rows of a chunk of ``count`` tokens that are compared, as (first, last + 1)."""
    if count <= CHUNK_PARTS * PART_TOKENS:
        return [(0, count)]
    starts = [part * (count - PART_TOKENS) // (CHUNK_PARTS - 1) for part in range(CHUNK_PARTS)]
    return [(start, start + PART_TOKENS) for start in starts]
