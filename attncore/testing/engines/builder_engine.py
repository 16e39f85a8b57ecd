"""An engine whose steps the persistent builder makes for the backend itself, as a serving engine has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attncore.builder import MetadataBuilder
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine


class BuilderEngine(Engine):
    """Steps are made by ``MetadataBuilder(batch, backend, depth=...)``, which plans them and, with every ``depth``
    steps, uses the same metadata object and the same memory again.
    """

    def __init__(self, backend: Any, *, depth: int, **given: Any) -> None:
        super().__init__(backend, **given)
        longest = self.builder.max_num_batched_tokens
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=longest, depth=depth)

    def step(self, scheduled: Mapping[Any, int], **padding: int) -> Tensor:
        """Run a step for ``scheduled`` alone; without padding. Returns the output on the host."""
        if padding:
            raise TypeError(f"BuilderEngine.step: {sorted(padding)} are of engines that pad a copy of the step")
        built = self.builder.build(self.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in built.req_ids]
        return self.run_step(built, requests)
