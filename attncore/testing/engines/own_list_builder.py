"""Engines whose steps the backend's own list builder makes: it plans them, moves them on, and writes captured sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncore.builder import InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.testing.engines.captured_engine import CapturedEngine, Graph
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata

OF_CAPTURED = (
    "; the step was built by backend.get_builder_cls() for a captured size, planned, and written by state.prepare: the "
    "graph's layers have the metadata of state.metadata_for_capture, whose arrays and metadata.kept are that step's"
)


class OwnListBuilder:
    """``backend.get_builder_cls()``, made for the backend, and its state; called as engines call MetadataBuilder.

    A builder of the batch's own moves the requests on. Prompts are rows of several tokens, and those without context.
    """

    def __init__(
        self, batch: InputBatch, backend: AttentionBackend, *, max_num_batched_tokens: int, decode_threshold: int = 1,
        sliding_window: int | None = None, chunked_prefill: bool = False,
    ) -> None:  # fmt: skip
        self.batch = batch
        self._host = MetadataBuilder(
            batch, max_num_batched_tokens=max_num_batched_tokens, decode_threshold=decode_threshold
        )
        self.lists = backend.get_builder_cls()(
            backend.config.block_size, sliding_window=sliding_window, chunked_prefill=chunked_prefill,
            max_seq_len_to_capture=batch.max_model_len, backend=backend,
        )  # fmt: skip
        self.state = backend.get_state_cls()(backend, self.lists)
        self._in_place = False

    def capture(self, num_reqs: int, query_len: int = 1) -> CommonAttentionMetadata:
        """The metadata to capture a graph over; inside ``state.graph_capture``."""
        if query_len != 1:
            raise ValueError(f"query_len: {query_len}; captured sizes of the list builder hold decodes of one token")
        metadata: CommonAttentionMetadata = self.state.metadata_for_capture(num_reqs)
        return metadata

    def build_empty(self, bucket: int) -> CommonAttentionMetadata:
        """A captured size without requests."""
        with self.state.graph_capture(bucket):
            return self.capture(bucket)

    def build(
        self, scheduled: Mapping[Any, int], *, query_len: int = 1, bucket: int | None = None
    ) -> CommonAttentionMetadata:
        """The planned step of ``scheduled``, as ``metadata.req_ids`` orders it; prepared where it has a ``bucket``."""
        contexts = {name: self.batch.num_computed_tokens(name) for name, count in scheduled.items() if count}
        prompts = {name for name, context in contexts.items() if scheduled[name] > 1 or not context}
        self._host.build(scheduled, query_len=query_len)
        names = sorted(contexts, key=lambda name: name not in prompts)
        groups = [self._group(name, scheduled[name], contexts[name], name in prompts) for name in names]
        pad = -1 if bucket is None else bucket - len(groups)
        self._in_place = not self._in_place
        if bucket is not None and self._in_place:  # in turns: both ways of writing a captured size
            metadata = self.state.build(groups, pad)
        else:
            metadata = self.lists.build(groups, pad)
            if bucket is not None:
                metadata = self._prepared(metadata, groups, pad)
        metadata.req_ids = tuple(names)
        self.state.begin_forward(metadata)
        return metadata

    def _prepared(self, metadata: CommonAttentionMetadata, groups: list[SequenceGroup], pad: int) -> Any:
        """The step of ``groups``, written to its captured size after another of the size was built: of one of its
        requests. A library that keeps the plan of the last one may refuse it; it is built again then.
        """
        self.lists.build(groups[:1], pad + len(groups) - 1)
        try:
            self.state.prepare(metadata)
            self.state.begin_forward(metadata)
        except ValueError as error:
            if not str(error).startswith("metadata"):
                raise
            metadata = self.lists.build(groups, pad)
            self.state.prepare(metadata)
        return metadata

    def advance(self, metadata: CommonAttentionMetadata) -> None:
        """Move a step of this builder on by one token for each request, in place; prompts become decodes."""
        self._host.build({**dict.fromkeys(self.batch.req_ids, 0), **dict.fromkeys(metadata.req_ids, 1)})
        metadata.advance_step(turn_prefills_into_decodes=True)
        self.state.begin_forward(metadata)

    def _group(self, name: Hashable, tokens: int, context: int, is_prompt: bool) -> SequenceGroup:
        return SequenceGroup(is_prompt, [Sequence(0, tokens, context, self.batch.block_ids(name))])


class ListBuilderEngine(Engine):
    """Steps are made, and planned, by the backend's own list builder."""

    def __init__(self, backend: AttentionBackend, *, chunked_prefill: bool, **given: Any) -> None:
        super().__init__(backend, **given)
        self.own = OwnListBuilder(
            self.batch, backend, max_num_batched_tokens=self.builder.max_num_batched_tokens,
            sliding_window=self.features.get("sliding_window"), chunked_prefill=chunked_prefill,
        )  # fmt: skip
        self.last: CommonAttentionMetadata | None = None

    def step(self, scheduled: Mapping[Any, int], **padding: int) -> Tensor:
        """Run a step for ``scheduled`` alone; without padding. Returns the output on the host."""
        if padding:
            raise TypeError(f"ListBuilderEngine.step: {sorted(padding)} are of engines that pad a copy of the step")
        self.last = self.own.build(self.scheduled(dict(scheduled)))
        return self._run(self.last, scheduled)

    def advance(self) -> Tensor:
        """Move the last step on by one token in place, and run it. Returns the output on the host."""
        if self.last is None:
            raise ValueError("advance: no step yet; run one with step(scheduled)")
        self.own.advance(self.last)
        return self._run(self.last, dict.fromkeys(self.last.req_ids, 1))

    def _run(self, metadata: CommonAttentionMetadata, scheduled: Mapping[Any, int]) -> Tensor:
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in metadata.req_ids]
        return self.run_step(metadata, requests)


class CapturedListEngine(CapturedEngine):
    """Decodes of one token run through graphs of the sizes of the list builder's state."""

    builder: OwnListBuilder  # type: ignore[assignment]

    def __init__(self, backend: AttentionBackend, **engine: Any) -> None:
        super().__init__(backend, 1, make_builder=OwnListBuilder, **engine)

    def _captured(self, size: int) -> tuple[Graph, Tensor]:
        with self.builder.state.graph_capture(max(self.sizes)):
            return super()._captured(size)

    def _record(self, metadata: Any) -> None:
        """Nothing: a graph of the list builder reads the state's buffers, which are written between replays."""

    def _replay(self, metadata: Any, graph: Graph) -> None:
        graph.replay()

    def replay(self, chosen: list[Any]) -> None:
        """``CapturedEngine.replay``; what is wrong in one says what the graph's layers were given."""
        try:
            super().replay(chosen)
        except ConformanceError as error:
            raise ConformanceError(f"{error}{OF_CAPTURED}", error.max_error) from None
