"""MetadataBuilder, the persistent builder: builds the metadata of each step from the state of an InputBatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attncore import arguments, env
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.device.captured_sizes import of_size
from attncore.builder.device.transport import sends
from attncore.builder.fields import Length, engine_field
from attncore.builder.metadata import CommonAttentionMetadata, step_of
from attncore.builder.persistent.assembly import Assembly
from attncore.builder.persistent.columns import Column
from attncore.builder.persistent.draft_trees import DraftTrees, check_draft_trees
from attncore.builder.persistent.engine_fields import EngineFields, FillField
from attncore.builder.persistent.group_backends import backends_of
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.overlap import PREVIOUS_ROWS, Overlap, check_overlapped
from attncore.builder.persistent.poison import expiring
from attncore.builder.persistent.profiling_run import profile_metadata, profiled_lengths
from attncore.builder.persistent.run_ahead import RunsAhead, sent_ahead
from attncore.builder.persistent.settings import check_captured_size, check_settings, check_states
from attncore.builder.persistent.spans import check_spans
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.builder.persistent.taking_back import refuse_unfinished
from attncore.builder.show import builder_text
from attncore.builder.uncopied import Uncopied
from attncore.errors import CaptureError
from attncore.quoted import quoted
from attncore.show import guarded

_ALL_REQUESTS: Mapping[Any, int] = MappingProxyType({})
_ONE = 1
"""CPython has one object of this int, which neither True nor 1.0 is."""


def _no_short_way(*_: Any) -> None:
    """Stands for the kernel's direct calls where a step has to be planned, sent or filled by an engine."""


class MetadataBuilder(RunsAhead, Uncopied):
    """Builds the metadata of one step after another from ``batch``, for ``backend``.

    ``backend`` None gives NumPy arrays; with a backend, metadata holds torch tensors on its device. With several
    KV-cache groups, ``backend`` may map each group's name to a backend. ``depth`` arenas are used in turn: metadata is
    valid until ``depth`` builds later, of which the last may be one that is refused. All memory (``nbytes``) is taken
    at construction. One thread at a time.

    A request is a decode where it runs up to ``decode_threshold`` tokens in a step (1 + drafts, for speculative
    decoding), a prefill where it runs more. ``max_num_batched_tokens`` bounds the tokens of a step, and
    ``max_num_encoder_tokens`` its encoder tokens (default: the larger of ``max_encoder_len`` and
    ``max_num_batched_tokens``). With ``context_parallel``, slots, lengths and pages are those of this rank's cache, and
    the batch's block size is the virtual one; not with a backend and ``decode_threshold`` above 1.

    ``transport`` is how a step reaches a device with its own memory. ``graph``: nodes of captured graphs fetch it.
    ``copy``: one packed copy and an event; on a CPU too, where otherwise nothing is copied. ``auto``: ``graph`` where
    a test of it succeeds, else ``copy``. The attribute ``transport`` says which one is used, ``why_transport`` why.

    ``ticket`` is for engines that replay their graphs themselves: ``metadata.replay`` is not needed. With ``graph``,
    each step's number is written to the device, in stream order, when the step is built, at the cost of one launch; a
    replay without a build sees a step without rows. With ``copy`` it changes nothing: such a replay runs the last step
    again.

    ``num_rejected`` is for engines that build a step while the last one runs: int32[max_num_reqs] on the device, to
    which the engine's sampler writes, by row of its step, how many of the tokens were rejected.
    ``build(overlapped=True)`` then takes the host's lengths as upper bounds and corrects those on the device.

    With ``draft_trees`` drafts may form trees: ``build(trees=...)`` takes the parents of each request's drafts, steps
    have ``tree_mask``, and ``keep_paths`` says what was accepted. Each backend has to have the feature ``tree_mask``;
    not with ``num_rejected`` or ``context_parallel``.

    Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self,
        batch: InputBatch,
        backend: Any = None,
        *,
        max_num_batched_tokens: int,
        max_num_encoder_tokens: int | None = None,
        decode_threshold: int = 1,
        context_parallel: ContextParallel | None = None,
        transport: str = "auto",
        ticket: bool = False,
        num_rejected: Any = None,
        draft_trees: bool = False,
        depth: int = 2,
    ) -> None:
        if not isinstance(batch, InputBatch):
            raise TypeError(f"batch: {quoted(batch)} is not an InputBatch")
        self._settings = check_settings(
            max_num_batched_tokens, max_num_encoder_tokens, decode_threshold, context_parallel, transport, ticket,
            depth, batch._core.max_encoder_len,
        )  # fmt: skip
        self.batch, self._core = batch, batch._core
        context_parallel = self._settings.context_parallel
        self._backends = backends_of(self._core, backend, context_parallel, self._settings.decode_threshold)
        self._poison = env.poison()
        self._engine_fields, self._overlap = EngineFields(), None
        if num_rejected is not None:
            self._overlap = Overlap(self._backends, self._core.max_num_reqs, num_rejected, context_parallel, depth)
            self._engine_fields.add(engine_field(PREVIOUS_ROWS, np.int32, Length.REQUEST), self._overlap.fill)
        self._trees: DraftTrees | None = None
        if arguments.flag("draft_trees", draft_trees):
            check_draft_trees(self._backends, self._settings, num_rejected is not None)
            self._trees = DraftTrees(self._core)
            self._engine_fields.add(self._trees.field, self._trees.fill)
        if self._core.spans is not None:
            check_spans(self._backends, self._settings, num_rejected is not None)
        check_states(self._core.states, self._settings, num_rejected is not None)
        for slots in self._core.states.values():
            self._engine_fields.add(slots.field, slots)
        self._lay_out()

    def _lay_out(self) -> None:
        """Takes all memory, and chooses a step's path: the kernel's direct calls, or the longer one."""
        if sends(self._settings.transport, self._backends.device):
            self._refuse_other_follower()
        assembly = Assembly(
            self._core, self._backends, self._settings, self._engine_fields, self._overlap, self, self._poison
        )
        side, kernel = assembly.side, assembly.kernel
        if side is not None:
            self._core.follower, self._core.overlap = weakref.ref(self), self._overlap
            side.tables.forget()
        self._assembly = assembly
        self._refuse_while_capturing = assembly.refuse_while_capturing
        # A step that is planned or sent takes the longer path, which holds the batch until both are done.
        self._longer = bool(self._backends.plans or self._engine_fields.functions) or side is not None or self._poison
        one_call = assembly.in_one_call if self._trees is None else None  # which takes no trees
        self._sent_step = one_call.build if one_call is not None else None
        self._sent_ahead = sent_ahead(assembly)
        self._decode_step = _no_short_way if self._longer else kernel.decode_step
        self._padded_step = _no_short_way if self._longer else kernel.padded_step

    def _refuse_other_follower(self) -> None:
        """ValueError where the device tables of another builder follow the batch's."""
        other = self._core.follower() if self._core.follower else None
        if other is not None and other is not self and not other._assembly.closed:
            raise ValueError("batch: another builder's tables on a device follow it; close that builder first")

    @guarded
    def __repr__(self) -> str:
        return builder_text(self, self._backends, self._settings.depth, self._assembly.closed)

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return self.batch.kernels

    @property
    def max_num_batched_tokens(self) -> int:
        return self._settings.max_num_batched_tokens

    @property
    def max_num_encoder_tokens(self) -> int:
        return self._settings.max_num_encoder_tokens

    @property
    def decode_threshold(self) -> int:
        return self._settings.decode_threshold

    @property
    def context_parallel(self) -> ContextParallel | None:
        return self._settings.context_parallel

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1 before the first."""
        self._core.settle()
        return self._assembly.last_step

    @property
    def last_metadata(self) -> StepMetadata | None:
        """The metadata of step ``last_step``, as its build returned it.

        For an engine whose build was interrupted behind its last line (KeyboardInterrupt): where ``last_step`` has
        grown, the step was built. None before the first step, and where a failed build has taken the step's arena.
        """
        self._core.settle()
        metadata = self._assembly.last_metadata()
        return None if metadata is None else self._answer(metadata)

    @property
    def transport(self) -> str:
        """``"graph"``, ``"copy"``, or ``"none"`` where steps are read where they are built."""
        return self._assembly.side.name if self._assembly.side else "none"

    @property
    def why_transport(self) -> str:
        """One sentence: why this transport is used."""
        side = self._assembly.side
        return side.why if side else "steps are read where they are built, on the CPU"

    @property
    def nbytes(self) -> int:
        """Memory of the arenas, host and device, and of the device's tables and page indices, bytes."""
        return self._assembly.nbytes

    @property
    def captured(self) -> tuple[Any, ...]:
        """The captured sizes, ascending: numbers of requests that ``capture`` was called with; last, pairs of requests
        and tokens, where it was given these."""
        self._core.settle()
        return self._assembly.shapes.captured.sizes()

    def build(
        self,
        scheduled: Mapping[Any, int] = _ALL_REQUESTS,
        *,
        query_len: int = 1,
        bucket: int | tuple[int, int] | None = None,
        overlapped: bool = False,
        trees: Mapping[Any, Any] | None = None,
    ) -> StepMetadata:
        """Builds the metadata of the next step and advances every request by the tokens that it runs.

        ``scheduled`` maps requests to their tokens in this step; requests that it does not name run ``query_len``
        tokens, and those with 0 have no row. ``bucket``, one of ``captured``, pads the step to that size, for the
        replay of a graph. ``overlapped``: the last step may still run, so that lengths on the host are upper bounds
        (needs ``num_rejected``). The backend's ``plan`` runs before the metadata is returned.

        ``trees`` (needs ``draft_trees``) maps requests to the parents of their drafts, integers in one row: the index
        of an earlier draft, or -1 for the root, which is the request's first token in this step. Such a request runs
        1 + drafts tokens, at most 64, which ``scheduled`` need not say; their positions are by depth. Before it runs
        again, ``keep_paths`` says what was accepted.

        Raises ValueError where a token has no block, a limit is exceeded, a request is unknown, parents are no tree,
        nothing was kept of a request's last tree or the step does not fit the bucket, and CaptureError where the bucket
        was not captured or a stream is capturing; nothing has changed then, but that the step's arena may hold what was
        not built. Where an exception from outside interrupts it (KeyboardInterrupt), the step was built or nothing has
        changed: ``last_step`` tells which, and ``last_metadata`` is the step; None where the device has, in place of
        that step's fields, those of the step that was not built.
        """
        if trees is not None and self._trees is None:
            raise ValueError("trees: this builder was made without draft_trees, so drafts form chains")
        shape = None
        one_of_each = query_len is _ONE and (
            scheduled is _ALL_REQUESTS or (type(scheduled) in (dict, MappingProxyType) and not scheduled)
        )
        if overlapped is not False:
            overlapped = check_overlapped(overlapped, self._overlap)
        elif self._sent_step is not None and self._core.ran_trees is None:
            given = None if scheduled is _ALL_REQUESTS else scheduled
            metadata = self._sent_step(given, query_len, bucket)
            if metadata is not None:
                return metadata  # type: ignore[no-any-return]
        core = self._core
        # The longer way looks at trees, and at steps ahead, of another builder, and at spans.
        longer = self._longer or core.ran_trees is not None
        if core.spans is not None:
            longer = longer or core.spans.run(bucket)
        # Until the batch is entered a signal's handler may run steps ahead, of the builder that sends its steps.
        short = not longer and core.follower is None
        if bucket is None and one_of_each and short:
            metadata = self._decode_step()
            if metadata is not None:
                return metadata  # type: ignore[no-any-return]
        elif bucket is not None:
            if short:
                self._refuse_while_capturing("build")
                if one_of_each:
                    metadata = self._padded_step(bucket)
                    if metadata is not None:
                        return metadata  # type: ignore[no-any-return]
            shape = self._assembly.shapes.find(bucket)
        with self._core.enter():
            longer = longer or (core.ahead is not None and core.ahead.left > 0)
            if core.spans is not None:
                longer = longer or core.spans.run(bucket)
            if self._trees is not None:
                scheduled = self._trees.begin(trees, scheduled, self.decode_threshold)
                one_of_each = one_of_each and not scheduled
            if shape is None and not longer:
                return self._assembly.arrange(None, scheduled, query_len)[1]
            self._refuse_while_capturing("build")
            if self._overlap is not None:
                self._overlap.begin(overlapped, self._assembly.plans_on_host(shape))
            return self._answer(self._assembly.build(shape, scheduled, query_len, one_of_each))

    def keep_paths(self, paths: Mapping[Any, Any]) -> Any:
        """Keeps what was accepted of trees: ``paths`` maps requests that ran one in their last step to drafts.

        These are indices of drafts, as ``trees`` had them, along one path from the root on; an empty row keeps the root
        alone. The request's other drafts are taken back, as ``batch.rollback_many`` does. Returns the slots to move,
        int64[n, 2] on the host, from and to; with KV-cache groups a dict of them by group name. Hand them to
        ``backend.move_slots`` with the caches of all layers of the group before the next step runs: the accepted tokens
        then lie where the tokens of a chain do. A path that was a chain's moves nothing.

        Raises ValueError or TypeError, and changes nothing, where a request ran no tree in its last step or tokens of
        it were taken back since, where the drafts are no path, and where a window has passed what is kept.
        """
        if self._trees is None:
            raise ValueError("paths: this builder was made without draft_trees; batch.rollback_many takes back drafts")
        with self._core.enter():
            return self.batch._answer(self._trees.keep(paths))

    def capture(self, num_reqs: int, query_len: int = 1, *, num_tokens: int | None = None) -> StepMetadata:
        """Metadata to capture a graph over: an empty step, padded to ``num_reqs`` rows of ``query_len`` tokens.

        Its arrays lie at the fixed addresses that every later step of ``bucket=num_reqs`` has, and its ``max_seq_len``
        is the largest possible. It is planned like any step. Call it before the capture begins; a second call for a
        captured size returns the same metadata. Raises ValueError beyond the builder's capacity or the backend's
        ``cuda_graph`` level.

        With ``num_tokens`` rows have any lengths, prompts and chunks of them too, and that many tokens in all; later
        steps have ``bucket=(num_reqs, num_tokens)``. This needs a backend whose level is ``always``, and a batch
        without groups of states. Such a step's ``max_query_len`` is ``num_tokens``, and it counts no prefills.
        """
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        query_len = arguments.integer("query_len", query_len, 1)
        num_tokens = arguments.optional_integer("num_tokens", num_tokens, 1)
        self._refuse_while_capturing("capture")
        check_captured_size(num_reqs, query_len, num_tokens, self._core.max_num_reqs, self._settings)
        assembly = self._assembly
        bucket = num_reqs if num_tokens is None else (num_reqs, num_tokens)
        with self._core.enter():
            if bucket not in assembly.shapes.captured:
                self._core.undo.append((assembly.drop_size, bucket))
            assembly.kernel.add_shape(bucket, assembly.shapes.capture(num_reqs, query_len, num_tokens))
            metadata = assembly.build_empty(bucket, capturing=True)
            on_cpu = self._backends.device.startswith("cpu")
            return assembly.shapes.at_capture(metadata) if on_cpu else self._answer(metadata)

    def build_empty(self, bucket: int | tuple[int, int]) -> StepMetadata:
        """An empty step padded to a captured size, for a warm-up or a dummy replay; planned like any step."""
        self._refuse_while_capturing("build_empty")
        bucket = self._assembly.shapes.find(bucket).bucket
        with self._core.enter():
            return self._answer(self._assembly.build_empty(bucket, capturing=False))

    def build_profile(self, query_lens: Iterable[int]) -> CommonAttentionMetadata:
        """Metadata of a profiling run, before the cache exists: requests of ``query_lens`` tokens without blocks.

        Slots are -1 and tables are empty, so that a model runs without a cache and its memory can be measured. The
        batch does not change. The arrays are no arena's. Raises ValueError beyond the builder's capacity.
        """
        lens = profiled_lengths(query_lens, self._core.max_num_reqs, self.max_num_batched_tokens)
        self._refuse_while_capturing("build_profile")
        return profile_metadata(lens, [one for one in self._backends.by_group.values() if one is not None])

    def host_lengths(self, metadata: StepMetadata) -> str:
        """``"bounded"`` for an overlapped step, whose lengths on the host are upper bounds, and for views of one; else
        ``"exact"``."""
        return self._overlap.lengths_of(step_of(metadata)) if self._overlap is not None else "exact"

    def register_field(self, name: str, dtype: Any, per: str, fill: FillField) -> None:
        """Adds a field of the engine's to every step: ``metadata.<name>`` on the device, ``metadata.host.<name>``.

        ``per`` is ``"token"`` (T elements) or ``"request"`` (n elements). ``fill(metadata, out)`` writes the values of
        a step: ``out`` is a host array of zeros, in the order of ``metadata.req_ids``. Each build calls it, before the
        plan. Raises ValueError where the name is in use, CaptureError once a step was built or a size captured, and
        AttncoreError after ``close``; the builder is as it was then.
        """
        self._register("register_field", self._engine_fields.register, name, dtype, per, fill)

    def register_column(self, column: Column) -> None:
        """Adds a column of the batch to every step, as ``register_field`` does: ``metadata.<its name>``.

        The kernels take its values by row as each step is built; no function of the engine's runs. Raises as
        ``register_field``, and TypeError or ValueError for what is no column of this batch.
        """
        self._register("register_column", self._engine_fields.register_column, column, self._core)

    def _register(self, what: str, register: Callable[..., None], *args: Any) -> None:
        with self._core.enter():
            replaced = self._assembly
            replaced.refuse_closed()
            if replaced.kernel.next_step or self.captured:
                raise CaptureError(f"{what}: steps were built already; register fields before the first")
            self._core.undo.append((vars(self).update, vars(self).copy()))
            self._core.undo.append((self._engine_fields.restore, self._engine_fields.registered))
            register(*args)
            self._lay_out()
            if replaced.side is not None:
                replaced.side.close()  # no graph reads its memory

    def release(self, num_reqs: int | tuple[int, int]) -> None:
        """Releases a size, one of ``captured``, whose graph was destroyed: it may be captured again. CaptureError where
        a step waits."""
        assembly = self._assembly
        with self._core.enter():
            shape = assembly.shapes.find_released(num_reqs)
            refuse_unfinished(assembly, shape)
            self._core.undo.append((assembly.keep_size, shape.bucket, shape))
            assembly.drop_size(shape.bucket)
            if assembly.side is not None:
                assembly.side.release(shape)

    def close(self) -> None:
        """Waits for the device; no step can be built afterwards, and the memory is freed with the builder. Steps ahead
        that are not replayed are given back, as by ``steps.stop()``.

        Raises CaptureError while captured graphs still read the arenas: ``release`` them first.
        """
        assembly = self._assembly
        with self._core.enter():
            if assembly.closed:
                return
            if assembly.side is not None:
                sizes = assembly.side.recorded()
                if sizes:
                    raise CaptureError(
                        f"close: graphs of {', '.join(map(of_size, sizes))} read the arenas; destroy them and call "
                        "builder.release(size) for each"
                    )
                if assembly.ahead is not None:
                    assembly.ahead.stop_inside()
                assembly.side.close()
                if self._core.ahead is assembly.ahead:
                    self._core.undo.append((setattr, self._core, "ahead", self._core.ahead))
                    self._core.ahead = None  # which would keep this builder, and its memory, with the batch
            self._decode_step = self._padded_step = _no_short_way
            self._sent_step = self._sent_ahead = None
            assembly.closed = self._longer = True

    def _answer(self, metadata: StepMetadata) -> StepMetadata:
        return expiring(metadata) if self._poison else metadata
