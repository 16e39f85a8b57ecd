"""AdoptedSteps: makes steps of the device tensors that an engine has already."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from attncore import arguments, graphs
from attncore.builder.adopted.captured_rows import Captured, CapturedRows
from attncore.builder.adopted.device_fields import NOTHING, DeviceFields
from attncore.builder.adopted.error_texts import refused_step
from attncore.builder.adopted.given import Given, Place, check_memory, facts_of_tensors, place_of
from attncore.builder.adopted.host_given import check_blocks
from attncore.builder.adopted.known_steps import HostArguments, check_ready, device_of, forget, known_steps, remember
from attncore.builder.adopted.settings import Batch, check_settings, facts_of
from attncore.builder.adopted.size import Size, Sizes, new_arrays
from attncore.builder.adopted.step import AdoptedStep, Owner
from attncore.builder.device.memory import Readers
from attncore.builder.metadata import step_of
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP, KVCacheGroup
from attncore.builder.uncopied import Uncopied
from attncore.errors import ConcurrentUseError
from attncore.kernels import KernelsName, load_kernels
from attncore.show import angled, counted, guarded, short

_KEPT: list[Any] = []
"""Memory of AdoptedSteps that were dropped while graphs read it."""


class AdoptedSteps(Uncopied):
    """Makes the metadata of steps for ``backend`` from the tensors that an engine has on its device already.

    For engines with a batch of their own, such as vLLM or SGLang, behind whose runner a backend is to work:
    ``MetadataBuilder`` builds steps from an InputBatch, and this adopts them. Nothing is copied to the device or read
    from it, and nothing synchronises. One backend each (of a model with several KV-cache groups, one for each group);
    one thread, and one compute stream, at a time; a second caller is a ConcurrentUseError.

    ``max_num_reqs`` and ``max_num_tokens`` bound a step, ``max_model_len`` a request's keys. ``num_blocks``: the blocks
    of the engine's cache, below which its block ids are; None where they are not known yet, and ids are compared with
    no cache. A request is a decode where it runs up to ``decode_threshold`` tokens and all rows before it do. Engines
    put decodes first; what follows the first longer row is a prefill, right but slower. Host arrays are valid until
    ``depth`` more builds. ``kernels``: ``"cython"`` or ``"numba"``.

    Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self,
        backend: Any,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_blocks: int | None,
        decode_threshold: int = 1,
        depth: int = 2,
        kernels: KernelsName | None = None,
    ) -> None:
        self._settings = settings = check_settings(
            backend, max_num_reqs, max_num_tokens, max_model_len, num_blocks, decode_threshold, depth
        )
        self.backend, self._facts = backend, facts_of(backend)
        self.batch = Batch((KVCacheGroup(ONLY_GROUP, settings.block_size, num_blocks=settings.num_blocks),))
        self._device = device = device_of(backend)
        self._on_cpu, self._cuda = device.type == "cpu", device.type == "cuda"
        self._kernels, self._wrap = load_kernels(kernels), backend.from_host
        self._entrance = self._kernels.Entrance()
        self._entrance.refused = partial(
            ConcurrentUseError, "steps: a caller is inside them already, in this thread (a plan, say) or another"
        )
        self._uniform = self._facts.cuda_graph != "always"
        self._arrays = [new_arrays(settings.max_num_reqs) for _ in range(settings.depth + 1)]
        self._rows = [
            self._kernels.AdoptedRows(
                arrays, settings.max_num_reqs, settings.max_num_tokens, settings.block_size, settings.max_model_len,
                settings.decode_threshold, self._facts.pad_seq_len,
            )
            for arrays in self._arrays
        ]  # fmt: skip
        self._fields = DeviceFields(device, settings, page_list=self._facts.page_list)
        self._last: Any = None
        """What the last step's fields on the device were made from, as ``DeviceFields.restore`` takes it."""
        self._host = HostArguments(self._facts)
        self._captured = CapturedRows(self._facts, settings)
        self._owner = Owner(self, settings.depth)
        self._sizes = Sizes(
            self._fields, self._arrays, page_list=self._facts.page_list, lends=self._facts.pad_seq_len > 0,
            values={"_owner": self._owner, "_fields": self._fields, "_wrap": self._wrap, "_on_cpu": self._on_cpu},
        )  # fmt: skip
        self._plans = Readers(device.type, settings.depth)
        self._last_planned = -1  # steps of sizes whose graph plans by itself are not among them
        self._planning = False
        self._keeper: Any = None
        self._known = known_steps(
            self._kernels, device, self._entrance, self._owner, self._rows, settings.max_num_reqs,
            uniform=self._uniform,
        )  # fmt: skip
        self._fields.changed = partial(forget, weakref.ref(self))  # weakly: known steps hold the fields

    @guarded
    def __repr__(self) -> str:
        facts = [f"last step {self.last_step}" if self.last_step >= 0 else "no step built yet"]
        facts += [f"captured sizes {list(self.captured)}"] if self.captured else []
        facts += [counted(self._settings.max_num_reqs, "request"), f"max_num_tokens {self._settings.max_num_tokens}"]
        return angled(type(self).__name__, [*facts, f"{short(self.backend.name)} on {self._device}", self.kernels])

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self._kernels.IMPLEMENTATION)

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1 before the first.

        Behind an interrupted build it says whether that has happened. Where an interrupt came while it was taken back,
        too, the rest of that is done here.
        """
        if self._entrance.unfinished:
            with self._entrance.enter():
                pass
        last: int = self._owner.last_step
        return last

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured sizes, ascending: numbers of rows."""
        return self._captured.sizes()

    @property
    def nbytes(self) -> int:
        """Memory of the host arrays and of what is made on the device, bytes."""
        host = [array.nbytes for arrays in self._arrays for array in arrays.values()]
        return int(self._fields.nbytes + sum(host))

    def host_lengths(self, metadata: Any) -> str:
        """What the host knows of the lengths of a step, or of views of one: ``exact``, ``bounded`` (upper bounds) or
        ``none``."""
        return str(getattr(step_of(metadata), "lengths", "exact"))

    def capture(self, num_reqs: int, query_len: int = 1) -> None:
        """Registers a size that a graph is captured for: ``num_reqs`` rows of ``query_len`` tokens.

        The first step of the size is the one to capture over: lengths are the largest possible in its counts.
        ``build(capturing=True)`` does both. ValueError beyond the capacity or the backend's ``cuda_graph`` level.
        """
        num_reqs, query_len = arguments.integer("num_reqs", num_reqs, 1), arguments.integer("query_len", query_len, 1)
        with self._entrance.enter():
            self._known.forget()
            self._captured.register(num_reqs, query_len)
            self._keep_memory()

    def release(self, num_reqs: int) -> None:
        """Releases a captured size whose graph was destroyed: it may be captured again."""
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        with self._entrance.enter():
            self._known.forget()
            self._captured.release(num_reqs)
            if not self.captured and self._keeper is not None:
                self._keeper.detach()
                self._keeper = None

    def build(
        self,
        *,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        host_query_start_loc: Any = None,
        host_seq_lens: Any = None,
        bounded: bool = False,
        capturing: bool = False,
    ) -> AdoptedStep:
        """The metadata of the next step: n rows, decodes first, and T tokens. It is planned when this returns.

        On the backend's device: ``query_start_loc`` int32[n + 1], ``seq_lens`` int32[n] with the step's tokens counted,
        ``block_table`` int32[n, columns] of any row stride, ``slot_mapping`` int64[T], -1 where nothing is written.
        On the host, NumPy arrays or tensors: ``host_query_start_loc`` int32[n + 1] and ``host_seq_lens`` int32[n],
        upper bounds where ``bounded``. On a CPU they default to the tensors themselves; elsewhere ``host_seq_lens``
        may be missing for a backend whose spec says ``host_lengths="none"``.

        Rows without tokens behind all others are padding, as are tokens behind the last row's. An eager step is cut to
        what is not padding: run layers over ``metadata.num_tokens`` tokens. A step of a captured size (its rows, and as
        many slots as they may have tokens) keeps it, and its tensors must lie where they lay at the capture.
        ``capturing``: the step is one to capture a graph over, and its size becomes a captured one.

        Raises ValueError or TypeError that names the argument, CaptureError while a stream is capturing, and
        ConcurrentUseError while another caller, such as the plan of a step, is inside; nothing has changed then, and an
        older step's arrays are as they were. Where the plan failed, or the call was interrupted, fields on the device
        that had been written are made again from the last step's tensors, and metadata that the plan kept makes none.
        """
        if capturing is False:
            known: AdoptedStep | None = self._known.quick(
                self, query_start_loc, seq_lens, block_table, slot_mapping, host_query_start_loc, host_seq_lens, bounded
            )
            if known is not None:
                return known
        with self._entrance.enter():
            return self._build(
                (query_start_loc, seq_lens, block_table, slot_mapping), host_query_start_loc, host_seq_lens, bounded,
                capturing,
            )  # fmt: skip

    def _build(
        self, tensors: tuple[Any, ...], starts: Any, lengths: Any, bounded: bool, capturing: bool
    ) -> AdoptedStep:
        if self._cuda:
            check_ready(self._device)
        metadata = None
        if capturing is False:
            metadata = self._known.step(self, *tensors, starts, lengths, bounded)
        if metadata is None:
            metadata, captured, size, place = self._searched(tensors, starts, lengths, bounded, capturing)
        else:
            size, place = self._sizes.by_rows[metadata.num_reqs], None
            captured = self._captured.get(metadata.num_reqs) if metadata.use_cuda_graph else None
        self._fields.written = NOTHING
        self._entrance.undo.append((self._undo, metadata))  # an interrupt, too
        if place is None and size.prepared is not None:
            self._fields.make_prepared(size.prepared, metadata.max_seq_len)
        else:
            plans_itself = captured is not None and captured.plans_itself and not capturing and metadata.use_cuda_graph
            self._plan_and_make(metadata, tensors[1], plans_itself=plans_itself)
        if place is not None and captured is not None:
            if capturing:
                self._known.forget()
                self._captured.recorded(place.num_reqs, plans_itself=False)
            if captured.addresses is None and metadata.use_cuda_graph:
                self._captured.keep(captured, place)
                self._keep_memory()
        self._owner.last_step = metadata.step
        # An interrupt before this leaves the step before in it, which is right: no caller was given this one.
        self._last = size.given, size.kept, metadata.max_seq_len
        return metadata

    def _check_known(self, tensors: tuple[Any, ...], arguments: tuple[Any, ...] | None) -> None:
        """What KnownSteps asks of tensors that the host can read: before a step is filled, and (None) behind."""
        if arguments is None:
            check_blocks(Given(*tensors), self._settings)
        else:
            self._host.check(tensors, *arguments)

    def _searched(
        self, tensors: tuple[Any, ...], host_starts: Any, host_lengths: Any, bounded: bool, capturing: bool
    ) -> tuple[AdoptedStep, Captured | None, Size, Place]:
        """The metadata of the next step, its captured size, its size and its place; all arguments are checked here."""
        facts = facts_of_tensors(tensors)
        size = self._sizes.find(facts)
        if size is not None:
            place: Place = size.key[0]
        else:
            place = place_of(Given(*tensors), facts, self._device)
        known = size
        if known is None or self._on_cpu:  # torch may have shrunk a known tensor's memory since, and kept its address
            check_memory(Given(*tensors))
        num_rows, own = place.num_reqs, tensors if self._on_cpu else None
        starts, lengths, lengths_known = self._host.read(num_rows, own, host_starts, host_lengths, bounded)
        captured, query_len = self._captured.get(num_rows), 0
        if capturing is not False:
            capturing = arguments.flag("capturing", capturing)
            if capturing and captured is None:
                captured = self._captured.new(place)
        if captured is not None:
            query_len = captured.query_len
        step = self._owner.last_step + 1
        index = step % len(self._rows)
        counts = self._rows[index].fill(
            starts, lengths, place.num_slots, place.table_shape[1], query_len, self._uniform, capturing
        )
        if type(counts) is tuple:
            raise refused_step(counts[0], counts[1], starts, lengths, Given(*tensors), self._settings, query_len)
        if self._on_cpu:
            check_blocks(Given(*tensors), self._settings)
        if captured is not None and counts["use_cuda_graph"]:
            self._captured.settle_counts(counts, captured, place)
        size = self._sizes.of_step(tensors, place, counts, facts, known)
        metadata = self._metadata(size, counts, step, index, lengths_known)
        if captured is not None and metadata.use_cuda_graph and not capturing:
            metadata.defer(captured.made)
        if known is not None and not capturing and (captured is None or captured.addresses == place.addresses):
            remember(self._known, metadata, tensors, size, captured, self._fields, self._facts)
        return metadata, captured, size, place

    def _undo(self, metadata: AdoptedStep) -> None:
        """Behind a build that failed once ``metadata`` was made: what it wrote on the device is the last step's again.

        That is made anew from that step's tensors. Nothing is, where the failed step wrote nothing, or became the last.
        """
        if self._owner.last_step == metadata.step:
            return
        vars(metadata)["refused"] = True
        last = self._known.last_built(self._owner.last_step) or self._last
        if last is not None:
            self._fields.restore(*last, least=self._facts.pad_seq_len)

    def _record(self, metadata: AdoptedStep) -> None:
        """``metadata.record()``: inside the capture of a size's graph, or of a step that is run without it."""
        if not metadata.use_cuda_graph:
            return
        made, size, captures = (
            NOTHING,
            self._sizes.by_rows.get(metadata.num_reqs),
            graphs.is_capturing(str(self._device)),
        )
        if metadata._deferred and not captures:
            metadata.settle()
            return
        if captures and self._facts.records and size is not None and size.given is metadata._given:
            made = self._fields.live | ({"seq_lens"} if size.given.seq_lens is not size.kept.seq_lens else NOTHING)
            graphs.launch(self._settle, metadata, made)
        plans_itself = self._facts.plans and self.backend.record_plan(metadata)
        self._captured.recorded(metadata.num_reqs, plans_itself=plans_itself, made=made)
        self._known.forget()

    def _settle(self, metadata: AdoptedStep, names: frozenset[str]) -> None:
        """Makes ``names`` of a step of a captured size on the device."""
        engines, longest = metadata._engines, metadata.max_seq_len
        check_memory(engines)  # of an earlier call: the engine may have taken some away since
        self._fields.remake(metadata._given, engines, longest, names, least=self._facts.pad_seq_len)

    def _plan_and_make(self, metadata: AdoptedStep, seq_lens: torch.Tensor, *, plans_itself: bool) -> None:
        """Plans the step, where its graph does not, and makes on the device what the engine has not; ``seq_lens`` are
        the engine's."""
        by_graph, least = metadata._deferred, self._facts.pad_seq_len if metadata.use_cuda_graph else 0
        if self._facts.plans and not plans_itself:
            if least:  # keys are lent once the plan asks for lengths: one that does not, and fails, has written nothing
                metadata.defer(by_graph | {"seq_lens"})
            self._plan(metadata)
            by_graph &= metadata._deferred  # nothing, where the plan had them made
            if least:
                vars(metadata)["_deferred"] = by_graph
        self._fields.make_rest(metadata._given, seq_lens, metadata.max_seq_len, least=least, by_graph=by_graph)

    def _keep_memory(self) -> None:
        """Graphs know only addresses: what they read outlives a dropped AdoptedSteps."""
        if self._cuda and self._keeper is None:
            self._keeper = weakref.finalize(self, _KEPT.append, self._fields)
            self._keeper.atexit = False

    def _metadata(self, size: Size, counts: dict[str, Any], step: int, index: int, lengths: str) -> AdoptedStep:
        values = counts
        values |= size.values
        values["_arrays"], values["builder"] = size.host[index], self
        values["step"], values["lengths"] = step, lengths
        return AdoptedStep(values)

    def _plan(self, metadata: AdoptedStep) -> None:
        """The backend's plan, behind the copies of the last one, or of that ``depth`` steps ago where plans are copied
        from memory of their own.
        """
        if self._planning and self._cuda:  # it failed or was interrupted, and may have begun to copy
            torch.cuda.current_stream().synchronize()
        depth, step = self._settings.depth, metadata.step
        # Over already, but where the host runs far ahead of the device.
        self._plans.wait((self._last_planned if self._facts.waits_for_last_plan else step) % depth)
        self._planning = True
        self.backend.plan(metadata)
        self._plans.record(step % depth)
        self._last_planned = step
        self._planning = False
