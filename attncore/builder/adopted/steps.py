"""AdoptedSteps: makes steps of the device tensors that an engine has already."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from attncore import arguments, graphs
from attncore.builder.adopted.device_fields import DeviceFields
from attncore.builder.adopted.error_texts import refused_step
from attncore.builder.adopted.given import Given, Place, host_array, place_of
from attncore.builder.adopted.settings import Batch, check_settings, facts_of
from attncore.builder.adopted.step import AdoptedHost, AdoptedStep, Owner
from attncore.builder.device.memory import Readers, zeros
from attncore.builder.persistent.batch_arguments import ONLY_GROUP
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.builder.uncopied import Uncopied
from attncore.errors import CaptureError
from attncore.kernels import KernelsName, load_kernels
from attncore.show import angled, counted, guarded, short

_OF_STARTS = ("query_start_loc", "query_lens", "logits_indices")
_OF_LENGTHS = ("seq_lens", "context_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len")
_ONE_LONGER = ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "_starts")

_KEPT: list[Any] = []
"""Memory of AdoptedSteps that were dropped while graphs read it."""


class _Size:
    """What steps of one number of rows have in common: views of our memory, and the engine's tensors of last time."""

    __slots__ = ("device", "given", "host", "place")

    def __init__(self, device: dict[str, Any], host: list[dict[str, Any]]) -> None:
        self.device, self.host = device, host
        self.given: Any = None
        self.place: Any = None


class _Captured(NamedTuple):
    """A captured size: tokens of each row, and where the engine's tensors lay; None until the first step of it."""

    query_len: int
    addresses: tuple[int, ...] | None


class AdoptedSteps(Uncopied):
    """Makes the metadata of steps for ``backend`` from the tensors that an engine has on its device already.

    For engines with a batch of their own, such as vLLM or SGLang, behind whose runner a backend is to work:
    ``MetadataBuilder`` builds steps from an InputBatch, and this adopts them. Nothing is copied to the device or read
    from it, and nothing synchronises. One backend each (of a model with several KV-cache groups, one for each group);
    one thread, and one compute stream, at a time.

    ``max_num_reqs`` and ``max_num_tokens`` bound a step, ``max_model_len`` a request's keys. ``num_blocks``: the blocks
    of the engine's cache, where known. A request is a decode where it runs up to ``decode_threshold`` tokens, and all
    before it do; engines put decodes first, and what follows the first longer request is a prefill, which is right but
    slower. Host arrays are valid until ``depth`` more builds. ``kernels``: ``"cython"`` or ``"numba"``.

    Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self,
        backend: Any,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_blocks: int | None = None,
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
        self._uniform = self._facts.cuda_graph != "always"
        self._arrays = [_new_arrays(settings.max_num_reqs) for _ in range(settings.depth + 1)]
        self._rows = [
            self._kernels.AdoptedRows(
                arrays, settings.max_num_reqs, settings.max_num_tokens, settings.block_size, settings.max_model_len,
                settings.decode_threshold,
            )
            for arrays in self._arrays
        ]  # fmt: skip
        self._fields = DeviceFields(device, settings, page_list=self._facts.page_list)
        self._sizes: dict[int, _Size] = {}
        self._captured: dict[int, _Captured] = {}
        self._owner = Owner(self, settings.depth)
        self._plans = Readers(device.type, 1)
        self._planning = False
        self._keeper: Any = None

    @guarded
    def __repr__(self) -> str:
        facts = [f"last step {self.last_step}" if self.last_step >= 0 else "no step built yet"]
        facts += [f"captured sizes {list(self.captured)}"] if self._captured else []
        facts += [counted(self._settings.max_num_reqs, "request"), f"max_num_tokens {self._settings.max_num_tokens}"]
        return angled(type(self).__name__, [*facts, f"{short(self.backend.name)} on {self._device}", self.kernels])

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self._kernels.IMPLEMENTATION)

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1 before the first."""
        return self._owner.last_step

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured sizes, ascending: numbers of rows."""
        return tuple(sorted(self._captured))

    @property
    def nbytes(self) -> int:
        """Memory of the host arrays and of what is made on the device, bytes."""
        return self._fields.nbytes + sum(array.nbytes for arrays in self._arrays for array in arrays.values())

    @property
    def pad_seq_len(self) -> int:
        """What the backend's own builder gives padded rows as length. 0 is right too, as engines pad: what a kernel
        then writes for such a row is not defined."""
        return self.backend.spec.pad_seq_len if self.backend.spec else 0

    def host_lengths(self, metadata: Any) -> str:
        """What the host knows of the lengths of a step: ``exact``, ``bounded`` (upper bounds) or ``none``."""
        return str(getattr(metadata, "lengths", "exact"))

    def capture(self, num_reqs: int, query_len: int = 1) -> None:
        """Registers a size that a graph is captured for: ``num_reqs`` rows of ``query_len`` tokens.

        The first step of the size is the one to capture over: lengths are the largest possible in its counts.
        ``build(capturing=True)`` does both. ValueError beyond the capacity or the backend's ``cuda_graph`` level.
        """
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        query_len = arguments.integer("query_len", query_len, 1)
        self._check_capture(num_reqs, query_len)
        if num_reqs not in self._captured:
            self._captured[num_reqs] = _Captured(query_len, None)
            self._keep_memory()

    def release(self, num_reqs: int) -> None:
        """Releases a captured size whose graph was destroyed: it may be captured again."""
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        if num_reqs not in self._captured:
            known = ", ".join(map(str, self.captured)) or "none"
            raise CaptureError(f"num_reqs: {num_reqs} was not captured (captured: {known}); release what was")
        del self._captured[num_reqs]
        if not self._captured and self._keeper is not None:
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
        On the host, NumPy arrays or tensors: ``host_query_start_loc`` int32[n + 1] and ``host_seq_lens`` int32[n], upper
        bounds where ``bounded``. On a CPU they default to the tensors themselves; elsewhere ``host_seq_lens`` may be
        missing for a backend whose spec says ``host_lengths="none"``.

        Rows without tokens behind all others are padding, as are tokens behind the last row's. An eager step is cut to
        what is not padding: run layers over ``metadata.num_tokens`` tokens. A step of a captured size (its rows, and as
        many slots as they may have tokens) keeps it, and its tensors must lie where they lay at the capture.
        ``capturing``: the step is one to capture a graph over, and its size becomes a captured one.

        Raises ValueError or TypeError that names the argument, and CaptureError while a stream is capturing; nothing
        has changed then, and an older step's arrays are as they were.
        """
        if self._cuda:
            graphs.refuse_while_capturing("cuda", "build")
        given = Given(query_start_loc, seq_lens, block_table, slot_mapping)
        place = place_of(given, self._device)
        starts = self._host_starts(given, place, host_query_start_loc)
        lengths, known = self._host_lengths_of(given, place, host_seq_lens, bounded)
        captured, query_len = self._captured.get(place.num_reqs), 0
        if capturing is not False:
            capturing = arguments.flag("capturing", capturing)
            if capturing and captured is None:
                captured = self._size_to_capture(place)
        if captured is not None:
            query_len = captured.query_len
        index = (self._owner.last_step + 1) % len(self._rows)
        counts = self._rows[index].fill(
            starts, lengths, place.num_slots, place.table_shape[1], query_len, self._uniform, capturing
        )
        if type(counts) is tuple:
            raise refused_step(*counts, starts, lengths, given, self._settings, query_len)
        if captured is not None and counts["use_cuda_graph"]:
            self._at_capture(counts, captured, place)
        metadata = self._metadata(given, place, counts, index, known)
        if self._facts.plans:
            self._plan(metadata)
        if self._fields.live:
            self._fields.make(metadata._given, metadata.max_seq_len)
        if captured is not None and metadata.use_cuda_graph and captured.addresses is None:
            self._captured[place.num_reqs] = captured._replace(addresses=place.addresses)
            self._keep_memory()
        self._owner.last_step += 1
        return metadata

    def _host_starts(self, given: Given, place: Place, host: Any) -> Any:
        if host is None:
            if not self._on_cpu:
                raise ValueError(
                    "host_query_start_loc: not given; the device's is not read, for that would wait: give the engine's "
                    "own on the host"
                )
            host = given.query_start_loc
        array = host_array("host_query_start_loc", host)
        if len(array) != place.num_reqs + 1:
            raise ValueError(
                f"host_query_start_loc: {len(array)} elements found beside {place.num_reqs + 1} on the device"
            )
        return array

    def _host_lengths_of(self, given: Given, place: Place, host: Any, bounded: bool) -> tuple[Any, str]:
        """The host's lengths, or None, and what they are; ValueError where the backend needs more."""
        facts = self._facts
        if bounded is not False:
            bounded = arguments.flag("bounded", bounded)
        if host is None and self._on_cpu and not bounded:
            host = given.seq_lens
        if host is None:
            if facts.host_lengths != "none":
                what = "exact lengths" if facts.host_lengths == "exact" else "lengths, or upper bounds of them,"
                raise ValueError(
                    f"host_seq_lens: not given, but backend {facts.name!r} needs {what} on the host (host_lengths "
                    f"{facts.host_lengths!r} in its spec)"
                )
            return None, "none"
        if bounded and facts.host_lengths == "exact":
            raise ValueError(
                f"bounded: backend {facts.name!r} needs exact lengths on the host (host_lengths 'exact' in its spec); "
                "give them, which an engine that drafts asynchronously cannot, or choose a backend that takes bounds"
            )
        array = host_array("host_seq_lens", host)
        if len(array) != place.num_reqs:
            raise ValueError(f"host_seq_lens: {len(array)} lengths found for {place.num_reqs} rows; give one each")
        return array, "bounded" if bounded else "exact"

    def _size_to_capture(self, place: Place) -> _Captured:
        """The size of a step that a graph is to be captured over, which is not registered before it is built."""
        num_rows, num_slots = place.num_reqs, place.num_slots
        query_len = num_slots // num_rows if num_rows else 0
        if not query_len or query_len * num_rows != num_slots:
            raise ValueError(
                f"capturing: {num_slots} slots found for {num_rows} rows; a graph is captured over rows of one length, "
                "so give each row as many"
            )
        self._check_capture(num_rows, query_len)
        return _Captured(query_len, None)

    def _check_capture(self, num_reqs: int, query_len: int) -> None:
        facts, settings = self._facts, self._settings
        known = self._captured.get(num_reqs)
        if known is not None and known.query_len != query_len:
            raise ValueError(
                f"query_len: {num_reqs} requests were captured with {known.query_len} tokens each, not {query_len}; call "
                f"release({num_reqs}) when that graph is gone"
            )
        if facts.cuda_graph == "never":
            raise ValueError(f"num_reqs: backend {facts.name!r} cannot be captured in a graph; run its steps without")
        if query_len > 1 and facts.cuda_graph == "uniform_decode":
            raise ValueError(f"query_len: {query_len}, but backend {facts.name!r} captures decodes of one token only")
        if query_len > settings.decode_threshold:
            raise ValueError(
                f"query_len: {query_len} is above decode_threshold {settings.decode_threshold}; graphs hold decodes only"
            )
        if num_reqs > settings.max_num_reqs:
            raise ValueError(f"num_reqs: {num_reqs} exceed max_num_reqs {settings.max_num_reqs}")
        if num_reqs * query_len > settings.max_num_tokens:
            raise ValueError(
                f"num_reqs: {num_reqs} of {query_len} tokens exceed max_num_tokens {settings.max_num_tokens}"
            )

    def _at_capture(self, counts: dict[str, int], captured: _Captured, place: Place) -> None:
        """Gives the first step of a captured size the largest possible lengths; of a later one, CaptureError where the
        engine's tensors lie elsewhere than its graph reads them."""
        if captured.addresses is None:
            most = min(self._settings.max_model_len, place.table_shape[1] * self._settings.block_size)
            counts.update(max_seq_len=most, max_decode_seq_len=most, max_query_len=captured.query_len)
        elif captured.addresses != place.addresses:
            pairs = zip(Given._fields, captured.addresses, place.addresses, strict=True)
            name, rows = next(name for name, before, now in pairs if before != now), place.num_reqs
            raise CaptureError(
                f"{name}: it lies elsewhere than at the capture of {rows} rows, and the graph reads it there; write to "
                f"that tensor, or call release({rows}) when the graph is gone"
            )

    def _keep_memory(self) -> None:
        """Graphs know only addresses: what they read outlives a dropped AdoptedSteps."""
        if self._cuda and self._keeper is None:
            self._keeper = weakref.finalize(self, _KEPT.append, self._fields)
            self._keeper.atexit = False

    def _metadata(self, given: Given, place: Place, counts: dict[str, Any], index: int, lengths: str) -> AdoptedStep:
        num_reqs, num_tokens = counts["num_reqs"], counts["num_tokens"]
        size = self._sizes.get(num_reqs)
        if size is None:
            size = self._sizes[num_reqs] = self._new_size(num_reqs)
        if size.place == (place, num_tokens):  # the same tensors: what is kept by them, such as a plan, is found again
            given = size.given
        else:
            if place.num_reqs != num_reqs or place.num_slots != num_tokens:
                given = given.cut(num_reqs, num_tokens)
            size.place, size.given = None, given
            size.place = place, num_tokens
        arrays = size.host[index]
        if lengths == "none":
            arrays = {name: arrays[name] for name in _OF_STARTS}
        if self._on_cpu:
            arrays = arrays | {"slot_mapping": given.slot_mapping.numpy(), "block_table": given.block_table.numpy()}
        values = counts
        if self._facts.page_list:
            values |= size.device
        values["query_start_loc"], values["seq_lens"], values["block_table"], values["slot_mapping"] = given
        values["host"], values["_given"] = AdoptedHost(arrays, num_tokens), given
        values["step"], values["lengths"] = self._owner.last_step + 1, lengths
        values["builder"], values["_owner"], values["_fields"] = self, self._owner, self._fields
        return AdoptedStep(values, self._wrap)

    def _new_size(self, num_reqs: int) -> _Size:
        host = [
            {name: arrays[name][: num_reqs + (name in _ONE_LONGER)] for name in (*_OF_STARTS, *_OF_LENGTHS)}
            for arrays in self._arrays
        ]
        return _Size(self._fields.sums(num_reqs), host)

    def _plan(self, metadata: AdoptedStep) -> None:
        """The backend's plan, behind the copies of the last one where it plans into one buffer."""
        if self._facts.waits_for_last_plan:
            if self._planning and self._cuda:  # it failed or was interrupted, and may have begun to copy
                torch.cuda.current_stream().synchronize()
            self._plans.wait(0)  # the device reached the last step long ago, but where the host runs far ahead
            self._planning = True
        self.backend.plan(metadata)
        if self._facts.waits_for_last_plan:
            self._plans.record(0)
            self._planning = False


def _device_of(backend: Any) -> torch.device:
    device = torch.device(backend.config.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _new_arrays(max_num_reqs: int) -> dict[str, Any]:
    names = (*_OF_STARTS, *_OF_LENGTHS, "_starts", "_lengths")
    return {name: zeros(max_num_reqs + (name in _ONE_LONGER), np.int32) for name in names}
