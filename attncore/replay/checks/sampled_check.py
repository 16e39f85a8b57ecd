"""Which requests of a replay are compared, in which of their steps, and the result of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.scheduling.step import Step
    from attncore.replay.traces.trace import Request

DECODE_STRIDE = 8  # of a sampled request, one decode in so many


class SampledCheck:
    """Compares the first request and a random one in ``every``: all its prompt chunks, its first and last decode and
    one decode in DECODE_STRIDE. A comparison is one request in one step."""

    def __init__(self, requests: Sequence[Request], every: int, seed: int, result: Verification) -> None:
        drawn = np.random.default_rng((seed, 1)).random(len(requests)) < 1 / every
        self.sampled = {request.row for request, chosen in zip(requests, drawn, strict=True) if chosen}
        self.sampled.add(requests[0].row)
        self.result = result
        result.max_abs_error = 0.0

    def chosen(self, step: Step) -> Iterator[tuple[RunningRequest, int]]:
        """The requests that are compared in a step, with the number of its tokens that they keep."""
        for running in step.decodes:
            if running.row not in self.sampled:
                continue
            new = 1 + step.draft(running).accepted  # the output of rejected drafts is not used
            if any(
                generated % DECODE_STRIDE == 1 or generated + 1 == running.request.output_tokens
                for generated in range(running.generated, running.generated + new)
            ):
                yield running, new
        for running, count in step.prefills:
            if running.row in self.sampled:
                yield running, count

    def book(self, error: float, allowed: float, sentence: str) -> None:
        """Count a comparison; ``sentence`` is its failure where ``error`` is above ``allowed`` or not a number."""
        self.result.checked += 1
        if not error <= allowed:
            self.result.fail(sentence)
        if error < float("inf"):
            self.result.max_abs_error = max(self.result.max_abs_error or 0.0, error)
