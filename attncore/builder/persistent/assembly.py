"""One step from the batch to the device: arrange rows, fill arrays, plan, send. A roll-back undoes all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments, graphs
from attncore.arguments import INT32_MAX
from attncore.builder.device.arena import ArenaRing, Capacity
from attncore.builder.device.memory import zeros
from attncore.builder.device.transport import attach_transport, new_transport
from attncore.builder.persistent import error_texts, taking_back
from attncore.builder.persistent.draft_trees import settle_trees
from attncore.builder.persistent.poison import POISON
from attncore.builder.persistent.sent_fields import sent_fields
from attncore.builder.persistent.step_shapes import StepShapes
from attncore.errors import AttncoreError, CaptureError
from attncore.kernels import codes
from attncore.quoted import quoted

if TYPE_CHECKING:
    from attncore.builder.blocks.context_parallel import ContextParallel
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.device.captured_sizes import Bucket
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.engine_fields import EngineFields
    from attncore.builder.persistent.group_backends import Backends
    from attncore.builder.persistent.overlap import Overlap
    from attncore.builder.persistent.settings import Settings
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.builder.persistent.steps_ahead import StepsAhead


class Assembly:
    """A builder's memory (arenas and transport), the kernel over it, and the stages that each step goes through."""

    def __init__(
        self,
        core: BatchCore,
        backends: Backends,
        settings: Settings,
        engine_fields: EngineFields,
        overlap: Overlap | None,
        builder: object,
        poison: bool,
    ) -> None:
        self.core = core
        self.settings = settings
        self.overlap, self._backends = overlap, backends
        self.ahead: StepsAhead | None = None
        """What the last ``run_ahead`` returned."""
        self.trees_before: dict[int, Any] = {}
        """The batch's ``ran_trees`` before the last step, which may be taken back."""
        self._poison = poison
        self._fill = engine_fields.fill if engine_fields.functions else None
        self.builder, self.closed = builder, False  # whose metadata this is, for backends that ask
        has_cross, max_num_reqs = core.cross is not None, core.lengths.shape[1]
        max_encoder = settings.max_num_encoder_tokens if has_cross else 0
        side = new_transport(settings.transport, backends.device, list(core.tables.values()), backends.page_lists)
        self.ring = ArenaRing(
            Capacity(settings.max_num_batched_tokens, max_num_reqs, max_encoder),
            [table.group.tokens_per_column for table in core.decoders],
            has_cross,
            settings.depth,
            extra=[*engine_fields.fields, *([core.spans.field] if core.spans is not None else [])],
            sent=sent_fields(backends, has_cross, overlap is not None, bool(core.states)) if side else None,
            journal_entries=side.journal_entries if side else 0,
            allocate=side.pinned if side else None,
        )
        if side is not None:
            side.ticket = settings.ticket
            side = attach_transport(side, self.ring, settings.transport)
            if overlap is not None:
                side.correct(overlap.num_rejected)
        elif overlap is not None:
            raise ValueError("num_rejected: steps are read where they are built; transport='copy' makes steps overlap")
        self.side: CopyTransport | None = side
        self.shapes = StepShapes(core, self.ring, backends, side, self, engine_fields.columns)
        self.eager = self.shapes.eager(settings.max_num_batched_tokens, settings.max_num_encoder_tokens)
        self.shapes.make_all()
        self.query_lens = zeros(max_num_reqs, np.int32)
        self.kernel = self._new_kernel(settings.context_parallel)
        self.columns = engine_fields.columns
        for column in self.columns:
            self.kernel.add_column(column.state)
        self._is_capturing = side.is_capturing if side else partial(graphs.is_capturing, backends.device)
        self.in_one_call: Any = None
        """The kernels' SentSteps, where a step is built and sent in one call."""
        if side is not None and not poison:
            self.in_one_call = side.in_one_call(
                core.kernels, self.kernel, core, backends, self.shapes.by_bits, self._fill
            )
        self._launch = side.launch if side else None

    def _new_kernel(self, ranks: ContextParallel | None) -> Any:
        core, settings = self.core, self.settings
        return core.kernels.StepKernel(
            core.state,
            self.eager,
            self.query_lens,
            zeros((len(self.query_lens), 2), np.int32),
            zeros(len(self.query_lens), np.int8),
            zeros((settings.depth, 2, len(self.query_lens)), np.int32),
            core.max_model_len,
            settings.max_num_batched_tokens,
            settings.max_num_encoder_tokens,
            settings.decode_threshold,
            ranks.world_size if ranks else 1,
            ranks.rank if ranks else 0,
            ranks.interleave if ranks else 1,
        )

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1: none."""
        return int(self.kernel.next_step) - 1

    def last_metadata(self) -> StepMetadata | None:
        """The metadata of the last step; None before the first, and where its memory, of the host or of the device,
        holds another step by now.
        """
        arena = self.kernel.last[self.last_step % self.ring.depth]
        if self.last_step < 0 or arena is None or arena.step != self.last_step:
            return None
        if self.side is not None and self.side.lost == self.last_step:
            return None
        metadata: StepMetadata | None = self.shapes.holding(arena)
        return metadata

    @property
    def nbytes(self) -> int:
        """Memory of arenas, host and device, and of the device's tables and page indices, bytes."""
        return self.ring.nbytes + (self.side.nbytes if self.side else 0)

    def build(self, shape: Any, scheduled: Mapping[Hashable, int], query_len: int, one_of_each: bool) -> StepMetadata:
        """Builds, plans and sends a step; ``shape`` None: an eager step, whose shape follows from its tokens.

        ``one_of_each``: every request runs one token, which the other two arguments say too.
        """
        num_rows = len(self.core.order.req_ids)
        self.acquire(shape)
        metadata = None
        # Poisoned memory is poisoned behind the checks, which this way and the filling of the arena are one call.
        if one_of_each and not self._poison:
            step_shape = shape or self.shapes.eager(num_rows, 0)
            self._begin(step_shape)
            metadata = self.kernel.decode_step_inside(step_shape)
        if metadata is None:
            step_shape, metadata = self.arrange(shape, scheduled, query_len)
        self.plan_and_send(step_shape, metadata)
        return metadata

    def build_empty(self, bucket: Bucket, *, capturing: bool) -> StepMetadata:
        """An empty step padded to a captured size; for the capture itself, with the largest lengths."""
        shape = self.shapes.find(bucket)
        if self.overlap is not None:
            self.overlap.overlapped = False  # of no rows, whatever the build before it was
        if capturing and self.side is not None and self._backends.device.startswith("cpu"):
            self.side.send_with_all()  # a stand-in graph reads host arrays there, too
        self.acquire(None if capturing else shape)  # a capture is planned whatever its size's graph did so far
        if capturing:
            self.core.undo.append((setattr, shape, "plans", shape.plans))
            shape.plans = None  # until the graph that is captured now records its own
        self._poison_arena()
        self._begin(shape)
        metadata: StepMetadata = self.kernel.empty_step(shape, self.core.max_model_len if capturing else 0)
        self.plan_and_send(shape, metadata, waits=not capturing, dummy=True)
        return metadata

    def _begin(self, shape: Any) -> None:
        """A roll-back from now on takes back the next step."""
        self.core.undo.append((self.kernel.take_back, shape, self.kernel.next_step))

    def acquire(self, shape: Any) -> None:
        """Waits until the device has read the arena that the next step is written to; ``shape`` None: an eager one."""
        if self.closed:  # asked here: a call would cost a planned step 5 %
            self.refuse_closed()
        step = self.kernel.next_step
        if self.core.ahead is not None:  # of another builder, too: their tokens count as computed
            self.core.ahead.refuse_left()
        if self.side is not None:
            self.side.check_ready()
            self.side.wait(step - self.ring.depth)
            if self._backends.waits_for_last_plan and (shape is None or shape.plans != ()):
                self.side.wait(step - 1)  # its library plans into one buffer

    def _poison_arena(self) -> None:
        """Poisons the arena that the next step is written to; a refused step leaves the older one's there."""
        if self._poison:
            arena = self.kernel.next_step % self.ring.depth
            self.ring.memory[arena][:] = POISON
            self.kernel.forget_arena(arena)

    def plan_and_send(self, shape: Any, metadata: StepMetadata, *, waits: bool = True, dummy: bool = False) -> None:
        """Plans the step and sends it to the device. ``waits``: a padded step waits for the replay of its graph.

        ``dummy``: it is no step of the engine's, but an empty one that the engine asked for as such.
        """
        core, side = self.core, self.side
        if self.overlap is not None:
            self.overlap.note(metadata.step)
        if core.ran_trees is not None:
            self.trees_before = core.ran_trees
            settle_trees(core, metadata)
        if core.spans is not None:  # ahead of what engines fill, who may look at them
            trees = getattr(self.builder, "_trees", None)
            core.spans.fill(metadata, getattr(shape, "bucket", None), () if trees is None else trees.given)
        if self._fill is not None:
            self._fill(metadata)
        if self._backends.plans:
            self._backends.plan(metadata, shape.plans)
        if side is not None:
            arena = metadata._arena
            core.undo.append((side.take_back, arena.step))
            side.send(arena.step, shape, arena, len(core.order.req_ids), waits and shape.pads)
            if side.name == "copy":
                for index in side.page_lists:
                    _ = metadata.groups[core.groups[index].name].paged_kv_indices
        elif shape.pads:
            core.undo.append((shape.commit, max(metadata.step - 1, 0)))  # graphs read the last step again
            shape.commit(metadata.step)
        if self.overlap is not None:
            core.undo.append((self.overlap.restore, *self.overlap.steps))
            self.overlap.remember(metadata, dummy=dummy)

    def keep_size(self, bucket: Bucket, shape: Any) -> None:
        """Makes ``shape`` that of a captured size."""
        self.shapes.captured[bucket] = shape
        self.kernel.add_shape(bucket, shape)

    def drop_size(self, bucket: Bucket) -> None:
        """Makes a size no captured one, where it is one."""
        self.kernel.drop_shape(bucket)
        self.shapes.captured.drop(bucket)

    def refuse_closed(self) -> None:
        """AttncoreError after the builder's ``close``."""
        if self.closed:
            raise AttncoreError("builder: closed; make another one")

    def refuse_while_capturing(self, what: str) -> None:
        """CaptureError that begins with ``what`` while a stream is capturing."""
        if self._is_capturing():
            raise CaptureError(
                f"{what}: a stream is capturing; it plans and copies, which a graph must not record. Call it before "
                "the capture begins, and before each replay"
            )

    def record(self, metadata: StepMetadata) -> None:
        """``metadata.record()``: the first nodes of the graph that is captured over it."""
        if not metadata.use_cuda_graph:
            raise CaptureError("record: this step was built without a bucket; capture over builder.capture(num_reqs)")
        shape = self.shapes.of(metadata)
        if self.side is not None:
            self.side.record(shape)
        if self._backends.plans:
            shape.plans = self._backends.record_plans(metadata)

    def record_next(self, metadata: StepMetadata) -> None:
        """``metadata.record_next()``: the nodes between two steps of the graph that is captured over it."""
        if not metadata.use_cuda_graph or self.side is None:
            raise CaptureError("record_next: call it in the capture over builder.capture(num_reqs), with a transport")
        self.side.record_next(self.shapes.of(metadata))
        if self._backends.plans:
            self._backends.record_plans(metadata)

    def replay(self, metadata: StepMetadata, graph: Any) -> None:
        """``metadata.replay(graph)``."""
        launch = self._launch
        if launch is not None and not self._is_capturing() and launch(metadata.step, graph):
            return
        if self.ahead is not None and self.ahead.left and self.ahead.step == metadata.step:
            self.ahead.replay(graph)
            return
        self.check_replay(metadata, graph)
        if self.side is None:
            graph.replay()
        else:
            self.side.replay(metadata.step, graph)

    def check_replay(self, metadata: StepMetadata, graph: Any) -> None:
        """CaptureError or TypeError where ``graph`` cannot be replayed over the step."""
        if not metadata.use_cuda_graph:
            raise CaptureError("replay: this step was built without a bucket; build(bucket=...) makes one for a graph")
        if not hasattr(graph, "replay"):
            raise TypeError(f"graph: {type(graph).__name__} has no replay(); give the graph that was captured")
        self.refuse_while_capturing("replay")

    def moved_on(self, step: int) -> bool:
        """Whether the device has gone beyond ``step``, by a later one or by itself."""
        ahead = self.ahead
        return self.last_step > step or (ahead is not None and ahead.step == step and ahead.launched > 1)

    def plans_on_host(self, shape: Any) -> list[str]:
        """The backends that plan each step of ``shape`` on the host, by the names of their groups."""
        left = getattr(shape, "plans", None)
        return [name for name, _ in (self._backends.plans if left is None else left)]

    def abandon(self, metadata: StepMetadata) -> None:
        """``metadata.abandon()``: takes back the last step, which waits for its replay; CaptureError for any other."""
        taking_back.abandon(self, metadata)

    def arrange(self, shape: Any, scheduled: Mapping[Hashable, int], query_len: int) -> tuple[Any, StepMetadata]:
        """Checks the scheduled step, orders its rows and fills its arrays; its shape and metadata.

        ``shape`` None: an eager step, whose shape follows from its tokens.
        """
        core, kernel = self.core, self.kernel
        if not isinstance(scheduled, Mapping):
            raise TypeError(f"scheduled: {quoted(scheduled)} is not a mapping of request to tokens")
        kernel.schedule_all(arguments.integer("query_len", query_len, 1))
        self.schedule(scheduled)
        self._check(shape)
        moves, num_decodes, num_reqs = kernel.arrange(core.start_moving)
        core.take_moves(moves)
        if shape is None:
            shape = self.eager if self.side is None else self.shapes.eager(*self._tokens_of_step())
        self._poison_arena()
        self._begin(shape)
        core.set_step_rows(num_reqs, bool(moves))
        metadata: StepMetadata = kernel.step(shape, num_decodes, num_reqs)
        metadata._arena.moves = moves
        return shape, metadata

    def _check(self, shape: Any) -> None:
        settings = self.settings
        code, row, token, group = self.kernel.check()
        if code == codes.NO_TOKENS:
            raise error_texts.refused_tokens(self.core, self.columns[group].name, row, self.query_lens)
        if code != codes.OK:
            raise error_texts.refused_step(
                self.core, code, row, token, group, self.query_lens, settings.max_num_batched_tokens,
                settings.max_num_encoder_tokens,
            )  # fmt: skip
        if shape is not None:
            code, row, count = self.kernel.check_shape(shape)
            if code != codes.OK:
                raise error_texts.refused_bucket(self.core, code, row, count, self.query_lens, shape)

    def schedule(self, scheduled: Mapping[Hashable, int]) -> None:
        """Writes the tokens of rows that do not run ``query_len``: holes, preempted and named requests."""
        order, query_lens = self.core.order, self.query_lens
        for row in order.holes:
            query_lens[row] = 0
        for row in order.paused:
            query_lens[row] = 0
        row_of = order.row_of
        for req_id, num_tokens in scheduled.items():
            row = row_of.get(req_id, -1)  # a key of a mapping: it is hashable
            if row < 0:
                raise ValueError(f"scheduled: {quoted(req_id)} is not in the batch")
            count = arguments.integer_or_none(num_tokens)
            if count is None:
                raise TypeError(f"scheduled: {quoted(num_tokens)}, for {quoted(req_id)}, is not an integer")
            if not 0 <= count <= INT32_MAX:
                wrong = "below 0" if count < 0 else f"above {INT32_MAX}"
                raise ValueError(f"scheduled: {count} for {quoted(req_id)} is {wrong}")
            query_lens[row] = count
        if self.core.states:
            for row in order.paused:
                if query_lens[row]:
                    raise error_texts.without_slot(self.core, row)

    def _tokens_of_step(self) -> tuple[int, int]:
        """Tokens and encoder tokens of the scheduled step."""
        query_lens = self.query_lens[: len(self.core.order)]
        lengths = self.core.lengths[:, : len(query_lens)]
        fresh = (query_lens > 0) & (lengths[codes.ENCODER_DONE] == 0)
        return int(query_lens.sum()), int(lengths[codes.ENCODER_LENS][fresh].sum())
