"""An engine whose steps the persistent builder makes for the backend itself, as a serving engine has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncore.builder import MetadataBuilder
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.steps_on_device import plan

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata


class BuilderEngine(Engine):
    """Steps are made by ``MetadataBuilder(batch, backend, depth=...)``, which plans them and, with every ``depth``
    steps, uses the same metadata object and the same memory again.
    """

    def __init__(self, backend: Any, *, depth: int, num_rejected: Tensor | None = None, **given: Any) -> None:
        super().__init__(backend, **given)
        longest = self.builder.max_num_batched_tokens
        on_cpu = str(self.config.device).startswith("cpu")  # where steps are read in place, unless they may overlap
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=longest, depth=depth, num_rejected=num_rejected,
            transport="copy" if on_cpu and num_rejected is not None else "auto",
        )  # fmt: skip

    def step(self, scheduled: Mapping[Any, int], **padding: int) -> Tensor:
        """Run a step for ``scheduled`` alone; without padding. Returns the output on the host."""
        if padding:
            raise TypeError(f"BuilderEngine.step: {sorted(padding)} are of engines that pad a copy of the step")
        return self.run_built(self.build(scheduled), scheduled)

    def build(self, scheduled: Mapping[Any, int], *, overlapped: bool = False) -> CommonAttentionMetadata:
        """The planned step of ``scheduled`` alone, which ``run_built`` runs. It counts as computed."""
        return self.builder.build(self.scheduled(dict(scheduled)), overlapped=overlapped)

    def run_parts(
        self, scheduled: Mapping[Any, int], parts: Callable[[CommonAttentionMetadata], Iterable[Any]]
    ) -> None:
        """Run a step for ``scheduled`` alone in ``parts``, views that are planned one by one."""
        for part in parts(self.build(scheduled)):
            plan(self.backend, part)
            self.run_built(part, scheduled)

    def run_built(self, built: CommonAttentionMetadata, scheduled: Mapping[Any, int]) -> Tensor:
        """Run a step that was built, after all that were built before it. Returns the output on the host."""
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in built.req_ids]
        return self.run_step(built, requests)
