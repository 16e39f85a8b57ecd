"""An engine of layers that attend within chunks of a request: each chunk that a step touches is a row of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from attncore.builder import local_attention_metadata
from attncore.dense import dense_attention
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.likely_cause import NOT_OF_DENSE
from attncore.testing.engines.steps_on_device import planned


class LocalEngine(Engine):
    """Steps of the persistent builder, of which ``local_attention_metadata`` makes those that run; chunks have
    ``chunk_size`` tokens.
    """

    def __init__(self, backend: Any, chunk_size: int, **given: Any) -> None:
        self.chunk_size = chunk_size
        super().__init__(backend, **given)

    def step(self, scheduled: Mapping[Any, int], **padding: int) -> Tensor:
        """Run a step for ``scheduled`` alone; without padding. Returns the output on the host."""
        if padding:
            raise TypeError(f"LocalEngine.step: {sorted(padding)} are of whole requests")
        built = self.builder.build(self.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in built.req_ids]
        local = local_attention_metadata(built, self.chunk_size, self.block_size)
        return self.run_step(planned(self.backend, local), requests)

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._by_chunks(query, key, value, causal=True)

    def mistakes(self, query: Tensor, one: StepRequest) -> Iterable[tuple[str, Tensor]]:
        keys, values = self.history[one.name]
        words = (
            "a token saw the keys behind it, too, in all chunks but a request's first: metadata.positions are places "
            "in the request, and not among the keys of the row"
        )
        yield words, self._by_chunks(query, keys, values, causal=False)[0]

    def _by_chunks(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """Dense attention of each chunk's queries over its own keys. ``causal``: in others than the first, too."""
        given = {name: it for name, it in self.features.items() if name not in NOT_OF_DENSE}
        context, found = len(key) - len(query), []
        for start in range(context - context % self.chunk_size, len(key), self.chunk_size):
            stop = min(start + self.chunk_size, len(key))
            queries = query[max(start - context, 0) : stop - context]
            found.append(
                dense_attention(
                    queries, key[start:stop], value[start:stop], causal=causal or not start, return_lse=True, **given
                )
            )
        outputs, sums = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(sums)
