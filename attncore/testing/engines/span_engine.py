"""An engine whose prompts have bidirectional spans: what each token sees, checked step by step."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attncore.builder import MetadataBuilder, new_tokens_metadata
from attncore.dense import dense_attention
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.likely_cause import NOT_OF_DENSE
from attncore.testing.engines.steps_on_device import planned

if TYPE_CHECKING:
    pass

Spans = Sequence[tuple[int, int]]
"""Ranges of positions in a request, in order."""


class SpanEngine(Engine):
    """An Engine of requests with spans."""

    with_spans = True

    def take_for_decodes(self, tokens: int) -> None:
        """Rows of up to so many tokens are decodes from now on."""
        most = self.builder.max_num_batched_tokens
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=most, decode_threshold=tokens)

    def set_spans(self, name: Hashable, spans: Spans) -> None:
        """Give a request, of which nothing is computed, its spans."""
        self.batch.set_spans(name, spans)

    def step_without_cache(self, scheduled: Mapping[Hashable, int]) -> None:
        """Run prompts as a step of their own tokens, handed over without a cache and without a table; the last step."""
        step = self.builder.build(self.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], 0) for name in step.req_ids]
        self.kv_cache = None
        self.run_step(planned(self.backend, new_tokens_metadata(step)), requests)

    def whole(self, name: Hashable, most: int) -> list[int]:
        """How many of a request's next ``most`` tokens make a chunk that cuts no span."""
        context, spans = self.context(name), self.batch.spans(name)
        return [n for n in range(1, most + 1) if not any(a < context + n < b for a, b in spans)]

    def spans_in(self, name: Hashable, tokens: int) -> bool:
        """Whether a request's next tokens hold a span."""
        context = self.context(name)
        return any(context <= start < context + tokens for start, _ in self.batch.spans(name))

    def chunks(self, name: Hashable, tokens: int, random: np.random.Generator, most: int = 4) -> list[int]:
        """``tokens`` tokens of a new request in ``most`` chunks or fewer, none of which cuts a span."""
        allowed = self.whole(name, tokens - 1)
        count = min(len(allowed), int(random.integers(0, most)))
        cuts = [0, *sorted(random.permutation(allowed)[:count].astype(int).tolist()), tokens]
        return [stop - start for start, stop in itertools.pairwise(cuts)]

    def expected(
        self, tensors: tuple[Tensor, Tensor, Tensor], requests: Iterable[StepRequest]
    ) -> list[tuple[Tensor, Tensor]]:
        requests = list(requests)
        found, start = super().expected(tensors, requests), 0
        for index, one in enumerate(requests):
            tokens = slice(start, start + one.tokens)
            start += one.tokens
            if spans := self.batch.spans(one.name):
                found[index] = self._with_spans(tensors[0][tokens], one, spans)
        return found

    def _with_spans(self, query: Tensor, one: StepRequest, spans: Spans) -> tuple[Tensor, Tensor]:
        """What a request's tokens of the step give where it has these spans."""
        given = {name: it for name, it in self.features.items() if name not in NOT_OF_DENSE}
        output, lse = dense_attention(query, *self.history[one.name], spans=spans, return_lse=True, **given)
        return output, lse

    def mistakes(self, query: Tensor, one: StepRequest) -> Iterable[tuple[str, Tensor]] | None:
        spans = self.batch.spans(one.name)
        return self._mistakes(query, one, spans) if spans else None

    def _mistakes(self, query: Tensor, one: StepRequest, spans: Spans) -> Iterable[tuple[str, Tensor]]:
        causal = self._with_spans(query, one, [])[0]
        yield "its tokens were in no span: span_ends was not read", causal
        if self.features.get("sliding_window") is not None:
            yield (
                "the window cut the spans: their tokens see each other whatever the window",
                self._hiding(query, one, spans),
            )
        if len(spans) > 1:
            joined = list(spans)
            for index in range(len(joined) - 1, 0, -1):
                if joined[index - 1][1] == joined[index][0]:
                    joined[index - 1 : index + 1] = [(joined[index - 1][0], joined[index][1])]
            yield "spans that touch were one", self._with_spans(query, one, joined)[0]
            yield "all of its spans were one", self._with_spans(query, one, [(spans[0][0], spans[-1][1])])[0]
        behind = [(start, min(stop + 1, one.context + one.tokens)) for start, stop in spans]
        yield "a span had the token behind it, too", self._with_spans(query, one, behind)[0]
        before = [(start, stop - 1) for start, stop in spans if stop - 1 > start]
        yield "the last token of a span were not in it", self._with_spans(query, one, before)[0]
        counted_from_step = [(start - one.context, stop - one.context) for start, stop in spans if start >= one.context]
        if one.context:
            yield (
                "span_ends counted from the step's tokens, not from the request's",
                self._with_spans(query, one, counted_from_step)[0],
            )

    def _hiding(self, query: Tensor, one: StepRequest, spans: Spans) -> Tensor:
        """The output where a window hides those tokens of a span, too, that lie behind it."""
        window, outputs = self.features["sliding_window"], []
        history = self.history[one.name]
        given = {name: it for name, it in self.features.items() if name not in NOT_OF_DENSE}
        for token in range(one.tokens):
            position = one.context + token
            stop = next((stop for start, stop in spans if start <= position < stop), position + 1)
            first, own = max(0, position - window + 1), position
            keys, values = (part[first:stop] for part in history)
            given["sliding_window"] = None
            outputs.append(
                dense_attention(
                    query[token, None].expand(stop - first, *query.shape[1:]), keys, values,
                    spans=[(0, stop - first)], **given,
                )[own - first, None]
            )  # fmt: skip
        return torch.cat(outputs)
