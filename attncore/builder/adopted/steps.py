"""AdoptedSteps: makes steps of the device tensors that an engine has already."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from attncore import arguments, graphs
from attncore.builder.adopted.captured_rows import CapturedRows
from attncore.builder.adopted.device_fields import NOTHING, DeviceFields
from attncore.builder.adopted.error_texts import refused_step
from attncore.builder.adopted.given import Given, Place, check_memory, facts_of_tensors, place_of
from attncore.builder.adopted.host_given import HostLengths, HostStarts, check_agreement, check_blocks
from attncore.builder.adopted.settings import Batch, check_settings, facts_of
from attncore.builder.adopted.size import Size, new_arrays
from attncore.builder.adopted.step import AdoptedStep, Owner
from attncore.builder.device.memory import Readers
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP, KVCacheGroup
from attncore.builder.uncopied import Uncopied
from attncore.errors import ConcurrentUseError
from attncore.kernels import KernelsName, load_kernels
from attncore.show import angled, counted, guarded, short

_NONE = (None, None)

_KEPT: list[Any] = []
"""Memory of AdoptedSteps that were dropped while graphs read it."""


class AdoptedSteps(Uncopied):
    """Makes the metadata of steps for ``backend`` from the tensors that an engine has on its device already.

    For engines with a batch of their own, such as vLLM or SGLang, behind whose runner a backend is to work:
    ``MetadataBuilder`` builds steps from an InputBatch, and this adopts them. Nothing is copied to the device or read
    from it, and nothing synchronises. One backend each (of a model with several KV-cache groups, one for each group);
    one thread, and one compute stream, at a time; a second caller is a ConcurrentUseError.

    ``max_num_reqs`` and ``max_num_tokens`` bound a step, ``max_model_len`` a request's keys. ``num_blocks``: the blocks
    of the engine's cache, below which its block ids are. A request is a decode where it runs up to ``decode_threshold``
    tokens and all rows before it do. Engines put decodes first; what follows the first longer row is a prefill, right
    but slower. Host arrays are valid until ``depth`` more builds. ``kernels``: ``"cython"`` or ``"numba"``.

    Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self,
        backend: Any,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_blocks: int,
        decode_threshold: int = 1,
        depth: int = 2,
        kernels: KernelsName | None = None,
    ) -> None:
        self._settings = settings = check_settings(
            backend, max_num_reqs, max_num_tokens, max_model_len, num_blocks, decode_threshold, depth
        )
        self.backend, self._facts = backend, facts_of(backend)
        self.batch = Batch((KVCacheGroup(ONLY_GROUP, settings.block_size, num_blocks=settings.num_blocks),))
        self._device = device = _device_of(backend)
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
        self._sizes: dict[int, Size] = {}
        self._found: dict[int, Size] = {}
        """By the rows that an engine gave, padding counted: the size of the last such step."""
        self._last: Any = None
        """What the last step's fields on the device were made from, as ``DeviceFields.restore`` takes it."""
        self._host_starts, self._host_lengths = HostStarts(), HostLengths(self._facts)
        self._captured = CapturedRows(self._facts, settings)
        self._owner = Owner(self, settings.depth)
        self._plans = Readers(device.type, settings.depth)
        self._last_planned = -1  # steps of sizes whose graph plans by itself are not among them
        self._planning = False
        self._keeper: Any = None

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
        """The number of the last step that was built; -1 before the first."""
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
        """What the host knows of the lengths of a step: ``exact``, ``bounded`` (upper bounds) or ``none``."""
        return str(getattr(metadata, "lengths", "exact"))

    def capture(self, num_reqs: int, query_len: int = 1) -> None:
        """Registers a size that a graph is captured for: ``num_reqs`` rows of ``query_len`` tokens.

        The first step of the size is the one to capture over: lengths are the largest possible in its counts.
        ``build(capturing=True)`` does both. ValueError beyond the capacity or the backend's ``cuda_graph`` level.
        """
        num_reqs, query_len = arguments.integer("num_reqs", num_reqs, 1), arguments.integer("query_len", query_len, 1)
        with self._entrance.enter():
            self._captured.register(num_reqs, query_len)
            self._keep_memory()

    def release(self, num_reqs: int) -> None:
        """Releases a captured size whose graph was destroyed: it may be captured again."""
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        with self._entrance.enter():
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
        with self._entrance.enter():
            return self._build(
                (query_start_loc, seq_lens, block_table, slot_mapping), host_query_start_loc, host_seq_lens, bounded,
                capturing,
            )  # fmt: skip

    def _build(
        self, tensors: tuple[Any, ...], host_query_start_loc: Any, host_seq_lens: Any, bounded: bool, capturing: bool
    ) -> AdoptedStep:
        if self._cuda:
            self._check_ready()
        facts = facts_of_tensors(tensors)
        size = self._found.get(facts[5][0]) if facts is not None and facts[5] else None  # [5]: the shape of seq_lens
        known = size is not None and size.facts == facts and size.kept.lies_at(facts)
        if known:
            place: Place = size.key[0]  # type: ignore[union-attr]
        else:
            place = place_of(Given(*tensors), facts, self._device)
        if not known or self._on_cpu:  # torch may have shrunk a known tensor's memory since, and kept its address
            check_memory(Given(*tensors))
        num_rows, own = place.num_reqs, tensors if self._on_cpu else _NONE
        starts = self._host_starts.of(num_rows, host_query_start_loc, own[0])
        lengths, lengths_known = self._host_lengths.of(num_rows, host_seq_lens, own[1], bounded)
        if self._on_cpu and not (host_query_start_loc is None and host_seq_lens is None):
            check_agreement(starts, lengths, lengths_known, tensors[:2])
        captured, query_len = self._captured.get(num_rows), 0
        if capturing is not False:
            capturing = arguments.flag("capturing", capturing)
            if capturing and captured is None:
                captured = self._captured.new(place)
        if captured is not None:
            query_len = captured.query_len
        owner = self._owner
        step = owner.last_step + 1
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
        size = self._size_of(tensors, place, counts, facts, size if known else None)
        metadata = self._metadata(size, counts, step, index, lengths_known)
        plans_itself = captured is not None and captured.plans_itself and not capturing and metadata.use_cuda_graph
        self._fields.written = NOTHING
        self._entrance.undo.append((self._undo, metadata))  # an interrupt, too
        self._plan_and_make(metadata, tensors[1], plans_itself=plans_itself)
        if capturing and captured is not None:
            self._captured.recorded(place.num_reqs, plans_itself=False)
        if captured is not None and captured.addresses is None and metadata.use_cuda_graph:
            self._captured.keep(captured, place)
            self._keep_memory()
        owner.last_step = step
        # An interrupt before this leaves the step before in it, which is right: no caller was given this one.
        self._last = size.given, size.kept, counts["max_seq_len"]
        return metadata

    def _undo(self, metadata: AdoptedStep) -> None:
        """Behind a build that failed once ``metadata`` was made: what it wrote on the device is the last step's again.

        That is made anew from that step's tensors. Nothing is, where the failed step wrote nothing, or became the last.
        """
        if self._owner.last_step == metadata.step:
            return
        vars(metadata)["refused"] = True
        if self._last is not None:
            self._fields.restore(*self._last, least=self._facts.pad_seq_len)

    def _check_ready(self) -> None:
        """CaptureError while a stream is capturing, RuntimeError where another device is the current one."""
        if torch.cuda.is_current_stream_capturing():
            graphs.refuse_while_capturing("cuda", "build")
        if torch.cuda.current_device() != self._device.index:
            raise RuntimeError(
                f"build: cuda:{torch.cuda.current_device()} is the current device, but these steps are on "
                f"{self._device}; build inside torch.cuda.device({self._device.index})"
            )

    def _record(self, metadata: AdoptedStep) -> None:
        """``metadata.record()``, inside the capture of a size's graph."""
        if self._facts.plans and metadata.use_cuda_graph:
            self._captured.recorded(metadata.num_reqs, plans_itself=self.backend.record_plan(metadata))

    def _plan_and_make(self, metadata: AdoptedStep, seq_lens: torch.Tensor, *, plans_itself: bool) -> None:
        """Plans the step, where its graph does not, and makes on the device what the engine has not; ``seq_lens`` are
        the engine's."""
        if self._facts.plans and not plans_itself:
            self._plan(metadata)
        if self._facts.pad_seq_len and metadata.use_cuda_graph:  # padded rows are lent keys
            self._fields.lend(metadata._given, seq_lens, self._facts.pad_seq_len)
        if self._fields.live:
            self._fields.make(metadata._given, metadata.max_seq_len)

    def _keep_memory(self) -> None:
        """Graphs know only addresses: what they read outlives a dropped AdoptedSteps."""
        if self._cuda and self._keeper is None:
            self._keeper = weakref.finalize(self, _KEPT.append, self._fields)
            self._keeper.atexit = False

    def _size_of(
        self, tensors: tuple[Any, ...], place: Place, counts: dict[str, Any], facts: Any, known: Size | None
    ) -> Size:
        """The size of a step, which keeps the tensors of its metadata.

        ``known``: that of the engine's rows, where it keeps tensors in this place.
        """
        num_reqs, num_tokens = counts["num_reqs"], counts["num_tokens"]
        lends = self._facts.pad_seq_len > 0 and counts["use_cuda_graph"]
        if known is not None and known.num_reqs == num_reqs and known.key[1] == num_tokens and known.key[2] == lends:
            return known  # the same tensors: what is kept by them, such as a plan, is found again
        size = self._sizes.get(num_reqs)
        if size is None:
            size = self._sizes[num_reqs] = Size(num_reqs, self._fields.sums(num_reqs), self._arrays)
        self._set_given(size, Given(*tensors).cut(num_reqs, num_tokens), (place, num_tokens, lends), facts)
        self._found[place.num_reqs] = size
        return size

    def _metadata(self, size: Size, counts: dict[str, Any], step: int, index: int, lengths: str) -> AdoptedStep:
        values = counts
        values |= size.values
        values["_arrays"], values["builder"] = size.host[index], self
        values["step"], values["lengths"] = step, lengths
        return AdoptedStep(values)

    def _set_given(self, size: Size, given: Given, key: tuple[Place, int, bool], facts: Any) -> None:
        """Has ``size`` keep the tensors of metadata, for this step and later ones, for the engine's ``given``."""
        place, _, lends = key
        before = size.key
        size.facts = size.key = None  # an interrupted call leaves none, facts first
        kept = given.alias()
        if (
            before is not None
            and (before[0].rows, before[2]) == (place.rows, lends)
            and size.kept.lies_at(place._replace(slots=size.kept.slot_mapping.data_ptr()))
        ):
            kept, given = size.kept._replace(slot_mapping=kept.slot_mapping), size.given
            given = given._replace(slot_mapping=kept.slot_mapping)
        else:
            given = kept._replace(seq_lens=self._fields.other("seq_lens", kept)) if lends else kept
        size.kept, size.given = kept, given
        size.values = {
            **(size.device if self._facts.page_list else {}), **given._asdict(), "_given": given,
            "_owner": self._owner, "_fields": self._fields, "_wrap": self._wrap, "_on_cpu": self._on_cpu,
        }  # fmt: skip
        size.key = key
        size.facts = facts if all(facts[:4]) else None  # without elements a tensor may be on any device

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


def _device_of(backend: Any) -> torch.device:
    device = torch.device(backend.config.device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
