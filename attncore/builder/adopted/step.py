"""The metadata of an adopted step: an engine's tensors, counts and host arrays of ours, and what is made on demand."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from attncore import env
from attncore.builder.adopted.device_fields import MADE, NOTHING, OF_ROWS, OF_TOKENS, SUMS
from attncore.builder.adopted.given import check_memory
from attncore.builder.device_slices import DeviceView
from attncore.builder.fields import ARRAYS, DERIVED, FIELDS, no_such_field
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP
from attncore.builder.slices import HostArrays
from attncore.errors import AttncoreError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncore.builder.adopted.device_fields import DeviceFields
    from attncore.builder.adopted.given import Given

OF_STARTS = ("query_start_loc", "query_lens", "logits_indices")
"""Host arrays that follow from where the rows' tokens start."""

_ON_DEMAND = {
    "token_to_req_indices": ("query_lens",),
    "positions": ("query_lens", "context_lens"),
    "paged_kv_indices": ("block_table", "paged_kv_indptr"),
}
"""Host fields that are made when they are asked for, and the fields that they are made from."""


class AdoptedHost(HostArrays):
    """The host arrays of an adopted step; those that follow from others are made on first access."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], num_tokens: int) -> None:
        super().__init__(**arrays)
        vars(self)["_num_tokens"] = num_tokens

    def _own(self, name: str) -> Any:
        arrays = vars(self._arrays)
        if name not in arrays and name in self._on_demand():
            arrays[name] = self._made(name, arrays)
        return arrays.get(name)

    _memory = _own

    def _on_demand(self) -> list[str]:
        """The fields that can be made of those that are here."""
        held = vars(self._arrays).keys()
        return [name for name, sources in _ON_DEMAND.items() if held >= set(sources)]

    def field_names(self) -> list[str]:
        """The fields that the step has on the host."""
        return sorted(
            {*super().field_names(), *self._on_demand()}
            - (set() if self._has_pages() else {*DERIVED, "paged_kv_indices"})
        )

    def _has_pages(self) -> bool:
        return hasattr(self._arrays, "paged_kv_indptr")

    def _made(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        if name == "paged_kv_indices":
            indptr, table = arrays["paged_kv_indptr"], arrays["block_table"]
            held = np.arange(table.shape[1]) < np.diff(indptr)[:, None]
            return np.ascontiguousarray(table[held])
        query_lens, num_tokens = arrays["query_lens"], self._num_tokens
        rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
        if name == "token_to_req_indices":
            out = np.full(num_tokens, max(len(query_lens) - 1, 0), np.int32)
            out[: len(rows)] = rows
            return out
        positions = np.zeros(num_tokens, np.int64)
        first = arrays["context_lens"].astype(np.int64) - arrays["query_start_loc"][:-1]
        positions[: len(rows)] = first.take(rows) + np.arange(len(rows))
        return positions


class ExpiringHost(AdoptedHost):
    """Under ATTNCORE_POISON=1: host arrays that raise AttncoreError once ``depth`` more steps have been built."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], num_tokens: int, owner: Owner, step: int) -> None:
        super().__init__(arrays, num_tokens)
        vars(self).update(_owner=owner, _step=step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                self._check_age(name)
            return super().__getattr__(name)

    def _own(self, name: str) -> Any:
        self._check_age(name)
        return super()._own(name)

    _memory = _own

    def _check_age(self, name: str) -> None:
        owner, step = self._owner, self._step
        if owner.last_step - step >= owner.ring.depth:
            raise AttncoreError(
                f"metadata: step {step} was asked for host.{name} after step {owner.last_step} was built; use a step's "
                f"host arrays before `depth` more builds, or give the steps a larger depth (now {owner.ring.depth})"
            )


class AdoptedStep(CommonAttentionMetadata):
    """The metadata of a step that an engine gave (``AdoptedSteps.build``).

    Its tensors are the engine's. What the engine has not is made on the device when a backend first asks for it, and in
    every step from then on, at fixed addresses: read it before the next build. Host arrays are valid until ``depth``
    more builds; lengths there may be upper bounds (``steps.host_lengths(metadata)``).
    """

    decodes_first = True
    group = ONLY_GROUP
    num_actual_reqs: int
    """Requests without the engine's padding; ``num_actual_tokens`` are their tokens."""
    num_actual_tokens: int
    lengths: str
    """``exact``, ``bounded`` or ``none``: what the host knows of the lengths."""
    refused = False
    """Whether its build failed: a plan may have kept it."""
    _deferred: frozenset[str] = NOTHING
    """Fields that the graph of its size makes when it is replayed."""
    _given: Given
    _engines: Given
    """The same as the engine gave them, where padded rows of ``_given`` are lent keys."""
    _fields: DeviceFields
    _owner: Any

    _arrays: dict[str, npt.NDArray[Any]]
    """The host arrays, of which ``host`` is made when it is first asked for."""
    _shared: Mapping[str, Any] = MappingProxyType({})
    """What all steps of its size have, where it was built in one call: it has these itself once they are asked for."""
    _rows: Any = None
    """What fills them then, where they are not."""
    _on_cpu: bool

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values  # they are this step's alone: nothing is copied

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes: what is made on demand.
            if name in self._shared:
                value = self._shared[name]
            elif name == "host":
                value = self._made_host()
            elif name.startswith("_") or name not in ARRAYS:
                raise no_such_field(type(self).__name__, name)
            elif name in DERIVED:
                value = FIELDS[name].derive(self)
                # A graph computes it in each replay, though a warm-up has read it; a plan may have asked too early.
                if self.use_cuda_graph or not self._is_on_device:
                    return value
            elif name == "seq_lens":
                self.settle()
                value = self._given.seq_lens
            elif name in MADE:
                value = self._made(name)
            else:
                raise no_such_field(type(self).__name__, name)
            self.__dict__[name] = value
            return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MADE, *DERIVED, *self._shared, "seq_lens"})

    def _made_host(self) -> AdoptedHost:
        arrays, given, owner = self._arrays, self._given, self._owner
        if self._rows is not None and owner.last_step - self.step <= owner.ring.depth:  # else a later step has them
            self._rows.fill_counted(self.num_reqs, self.lengths != "none")
        if self.lengths == "none":
            arrays = {name: arrays[name] for name in OF_STARTS}
        if self._on_cpu:
            check_memory(given)  # the engine may have taken some away since; torch resizes none that NumPy has seen
            arrays = arrays | {"slot_mapping": given.slot_mapping.numpy(), "block_table": given.block_table.numpy()}
        if self._owner.poisons:
            return ExpiringHost(arrays, self.num_tokens, self._owner, self.step)
        return AdoptedHost(arrays, self.num_tokens)

    def _made(self, name: str) -> Any:
        fields, given, last = self._fields, self._given, self._owner.last_step
        if self.refused:
            raise AttncoreError(
                f"metadata: {name} was asked for of a step whose build failed, and what lies there is of step {last}; "
                "use metadata that a build returned"
            )
        self.settle()
        if name not in fields.live and last > self.step:
            raise AttncoreError(
                f"metadata: {name} of step {self.step} was first asked for after step {last} was built, whose it "
                "would be; ask before the next build"
            )
        fields.ask(name, given, self.max_seq_len, under_way=self.step > last)
        if name in SUMS:
            return fields.sums(self.num_reqs)[name]
        if name in OF_ROWS or name in OF_TOKENS:
            return fields.other(name, given)
        return fields.page_buffer[: self._bound_of_pages()]

    @property
    def _is_on_device(self) -> bool:
        """Whether what is made on the device for the step was made: not yet while it is planned."""
        return bool(self._owner.last_step >= self.step)

    def defer(self, names: frozenset[str]) -> None:
        """The graph of its size makes ``names``, before it reads them."""
        if names:
            values = self.__dict__
            values["_deferred"] = names
            for name in names:
                values.pop(name, None)  # whoever reads it elsewhere has it made: ``__getattr__``

    def settle(self) -> None:
        """Makes at once what the graph of its size makes, for who reads it elsewhere; nothing behind a later step."""
        names, owner = self._deferred, self._owner
        if names and not self.refused and owner.last_step <= self.step:
            owner.builder._settle(self, names)
            self.__dict__["_deferred"] = NOTHING

    def _bound_of_pages(self) -> int:
        """How many page indices the step has, or at most has where the host knows bounds alone."""
        if hasattr(self.host, "paged_kv_indptr"):
            return int(self.host.paged_kv_indptr[-1])
        return len(self._given.seq_lens) * self._given.block_table.shape[1]

    @property
    def page_buffer(self) -> Any:
        """int32 on the device, of which ``paged_kv_indices`` is the beginning in every step; one tensor for all."""
        return self._fields.page_buffer

    @property
    def groups(self) -> Mapping[str, AdoptedStep]:
        """The step by the name of its KV-cache group, as several groups of a batch have it."""
        return MappingProxyType({self.group: self})

    def record(self) -> None:
        """As of a step of MetadataBuilder, called first inside a capture: what plans each step of the size on the
        device, where the backend can (``AttentionBackend.record_plan``), and what makes its fields there. Without it
        the host does both in each step. Outside a capture, before layers run over a step of a captured size without
        its graph: makes what the graph would have made.
        """
        self._owner.record(self)

    def replay(self, graph: Any) -> None:
        """Replays ``graph``, which was captured over this step's size, for this step; an engine may do so itself."""
        if not self.use_cuda_graph:
            raise CaptureError("replay: this step is of no captured size; run it without a graph")
        graph.replay()

    def _view(
        self, first: int, last: int, start: int, stop: int, *, whole_encoder: bool = False, **counts: int
    ) -> CommonAttentionMetadata:
        view = super()._view(first, last, start, stop, whole_encoder=whole_encoder, **counts)
        vars(view)["_taken_of"] = self, self.step  # what its repr tells its age by
        return DeviceView(view, self, first, last, start, stop)


class Owner:
    """What metadata asks of the steps that it is one of (``builder.show``)."""

    def __init__(self, builder: object, depth: int) -> None:
        self._builder, self.last_step = ref(builder), -1
        self.poisons = env.poison()
        """Whether late access of host arrays raises."""
        self.ring = SimpleNamespace(depth=depth)

    @property
    def builder(self) -> Any:
        """The AdoptedSteps, which every metadata of them holds."""
        return self._builder()

    def record(self, metadata: AdoptedStep) -> None:
        """``metadata.record()``; CaptureError for the step of a build that failed."""
        if metadata.refused:
            raise CaptureError("record: the build of this step failed; capture over metadata that a build returned")
        self.builder._record(metadata)
