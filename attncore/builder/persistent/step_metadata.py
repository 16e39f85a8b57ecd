"""The persistent door's metadata: one object an arena and bucket; its counts are the arena's, views are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from attncore.builder.device.arena import Arrays, Views
from attncore.builder.metadata import CommonAttentionMetadata, Wrap
from attncore.errors import AttncoreError

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import DeviceSide
    from attncore.builder.persistent.block_table import BlockTable
    from attncore.builder.persistent.input_batch import InputBatch

_TOKENS = frozenset(("slot_mapping", "positions", "token_to_req_indices"))
_LOCS = frozenset(
    ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "encoder_seq_start_loc", "encoder_query_start_loc")
)
_REQUESTS = frozenset(
    ("seq_lens", "context_lens", "query_lens", "logits_indices", "paged_kv_last_page_len",
     "encoder_seq_lens", "encoder_query_lens")
)  # fmt: skip
_TABLES = frozenset(("block_table", "cross_block_table"))
_FIELDS = _TOKENS | _LOCS | _REQUESTS | _TABLES | {"cross_slot_mapping"}
_OF_ONE_STEP = frozenset(("_indices", "_decode", "_prefill", "_kept"))
FIELD_NAMES = _FIELDS | {"paged_kv_indices", "prefill_query_start_loc", "prefill_seq_start_loc"}
_LENGTHS_OF_CROSS = {"seq_lens": "encoder_seq_lens", "seq_start_loc": "encoder_seq_start_loc"}


def _count(name: str) -> Any:
    return property(lambda self: getattr(self._arena, name))


class _HostFields:
    """NumPy views of an arena, sized to its step: made on first use, forgotten when a step has another size."""

    def __init__(
        self, arena: Any, fields: Arrays, tables: Mapping[str, BlockTable], rows: Any, extra: Mapping[str, str]
    ) -> None:
        self._arena, self._fields, self._tables, self._rows, self._extra = arena, fields, tables, rows, extra

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name not in _FIELDS and (name.startswith("_") or name not in self._extra):
            raise AttributeError(f"metadata.host has no field {name!r}")
        view: npt.NDArray[Any] = _cut(self._array(name), name, self._arena, self._extra)
        self.__dict__[name] = view
        return view

    def _array(self, name: str) -> npt.NDArray[Any]:
        if name in self._tables:
            return self._tables[name].array
        if name not in self._fields:
            raise AttributeError(f"metadata.host of this batch and group has no field {name!r}")
        return self._fields[name]

    @property
    def paged_kv_indices(self) -> npt.NDArray[np.int32]:
        """Gathered from the live table when asked for: a step that needs none pays nothing."""
        if self._arena.changes != self._rows.changes:
            raise AttncoreError(
                "paged_kv_indices: blocks have moved or left since this step was built; ask for them before the batch "
                "changes"
            )
        return self._tables["block_table"].page_indices(self.paged_kv_indptr)

    def forget(self) -> None:
        for name in (_FIELDS | self._extra.keys()) & self.__dict__.keys():
            del self.__dict__[name]


def _cut(array: Any, name: str, arena: Any, extra: Mapping[str, str]) -> Any:
    if name in _TOKENS or extra.get(name) == "token":
        return array[: arena.num_tokens]
    if name == "cross_slot_mapping":
        return array[: arena.num_cross_slots]
    return array[: arena.num_reqs + (name in _LOCS)]


class StepMetadata(CommonAttentionMetadata):
    """Valid until its arena is used again, ``depth`` builds later, and not to be written to.

    ``block_table`` is the live table: it, and what is gathered from it (``paged_kv_indices``, the views' tables), is
    this step's until a request leaves, is preempted or truncated, or a build moves rows. Ask for page indices before
    that; afterwards asking raises.

    ``groups`` maps each KV-cache group's name to the step as that group's layers see it: its own slots, table and
    pages, everything else shared. A batch of one group has one entry, the step itself.
    """

    decodes_first = True
    use_cuda_graph = False
    num_reqs = _count("num_reqs")
    num_tokens = _count("num_tokens")
    num_actual_reqs = _count("num_actual_reqs")
    num_actual_tokens = _count("num_actual_tokens")
    num_decodes = _count("num_decodes")
    num_decode_tokens = _count("num_decode_tokens")
    num_prefills = _count("num_prefills")
    num_prefill_tokens = _count("num_prefill_tokens")
    max_query_len = _count("max_query_len")
    max_seq_len = _count("max_seq_len")
    max_prefill_seq_len = _count("max_prefill_seq_len")
    max_decode_seq_len = _count("max_decode_seq_len")
    max_decode_query_len = _count("max_decode_query_len")
    num_encoder_tokens = _count("num_encoder_tokens")
    max_encoder_seq_len = _count("max_encoder_seq_len")
    step = _count("step")
    req_ids = _count("req_ids")
    moves = _count("moves")

    groups: Mapping[str, StepMetadata]
    group: str
    """The KV-cache group whose slots and table these are."""

    def __init__(
        self, arena: Any, group: str, fields: Arrays, tables: Mapping[str, BlockTable], rows: Any, wrap: Wrap,
        device: Mapping[str, Any] | None, pages: Callable[[Any], Any] | None, buffer: Callable[[], Any] | None,
        owner: Owner, extra: Mapping[str, str], *, padded: bool,
    ) -> None:  # fmt: skip
        super().__init__(_HostFields(arena, fields, tables, rows, extra), wrap)
        self._extra = extra
        self._arena, self._fields, self._device, self._pages = arena, fields, device, pages
        self._buffer = buffer
        self.group, self.use_cuda_graph, self._owner = group, padded, owner

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there yet. On a device, and for a captured graph, fields have fixed addresses.
        if name.startswith("_"):  # a copy in the making asks, before it has anything
            raise AttributeError(name)
        if self._device is not None and name in self._device:
            value = _cut(self._device[name], name, self._arena, self._extra)
        elif name in self._extra:
            value = self._wrap(getattr(self.host, name))
        else:
            return super().__getattr__(name)
        self.__dict__[name] = value
        return value

    @property
    def paged_kv_indices(self) -> Any:
        """int32[paged_kv_indptr[-1]]: the pages of the step's requests in turn. On a GPU made there, from its table."""
        if self._pages is not None:
            return self._pages(self)
        return self._this_step("_indices", lambda: self._wrap(self.host.paged_kv_indices))

    @property
    def builder(self) -> Any:
        """The MetadataBuilder whose step this is."""
        return self._owner

    @property
    def page_buffer(self) -> Any:
        """int32 on the device: all that ``paged_kv_indices`` are ever slices of; None where steps are not sent."""
        return None if self._buffer is None else self._buffer()

    def record(self) -> None:
        """Called first inside the capture of a graph over this metadata (``builder.capture``).

        Where steps are fetched by nodes of the graph itself, these are they; elsewhere it does nothing.
        """
        self._owner._record(self)

    def replay(self, graph: Any) -> None:
        """Replays ``graph``, which was captured over this step's size, for this step. Once a build.

        CaptureError where the step was built without a bucket, was replayed already, or its graph lacks ``record``.
        """
        self._owner._replay(self, graph)

    def abandon(self) -> None:
        """Takes the step back as if it had not been built: it will not be replayed. The last step built only."""
        self._owner._abandon(self)

    def forget_views(self) -> None:
        """Called by the kernel when this arena's step has another number of tokens or requests than its last."""
        for metadata in self.groups.values():
            metadata.host.forget()
            for name in (_FIELDS | self._extra.keys()) & metadata.__dict__.keys():
                del metadata.__dict__[name]

    def forget_step(self) -> None:
        """Called by the kernel when this arena's step is taken back: the next one has its number."""
        for metadata in self.groups.values():
            for key in _OF_ONE_STEP & metadata.__dict__.keys():
                del metadata.__dict__[key]

    def _cached(self, key: str, make: Any) -> Any:
        return self._this_step(key, make)

    def _this_step(self, key: str, make: Any) -> Any:
        step, value = self.__dict__.get(key, (None, None))
        if step != self._arena.step:
            value = make()
            self.__dict__[key] = self._arena.step, value
        return value

    def _decode_view(self) -> CommonAttentionMetadata | None:
        # All rows of a captured graph's step are decodes; what it records must lie where the next step's fields do.
        return self if self.use_cuda_graph else super()._decode_view()

    def _prefill_view(self) -> CommonAttentionMetadata | None:
        view = super()._prefill_view()
        if view is not None and "prefill_seq_start_loc" in self._fields:
            for name in ("query_start_loc", "seq_start_loc"):  # the kernel wrote the rebased sums in the same pass
                setattr(view.host, name, self._fields[f"prefill_{name}"][: self.num_prefills + 1])
                if self._device is not None:
                    setattr(view, name, self._device[f"prefill_{name}"][: self.num_prefills + 1])
        return view

    def _view(
        self, first: int, last: int, start: int, stop: int, *, whole_encoder: bool = False, **counts: int
    ) -> CommonAttentionMetadata:
        view = super()._view(first, last, start, stop, whole_encoder=whole_encoder, **counts)
        return view if self._device is None else DeviceView(view, self, first, last, start, stop)


class DeviceView(CommonAttentionMetadata):
    """Rows first..last of a step on a device: slices of its fields; what must be rebased is made when asked for."""

    def __init__(
        self, view: CommonAttentionMetadata, whole: StepMetadata, first: int, last: int, start: int, stop: int
    ) -> None:
        values = dict(vars(view))
        super().__init__(values.pop("host"), values.pop("_wrap"), **values)
        self._whole, self._rows, self._tokens = whole, slice(first, last), slice(start, stop)

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there yet.
        if name in _FIELDS or name == "paged_kv_indices":
            value = self.__dict__[name] = self._made(name)
            return value
        return super().__getattr__(name)

    def _made(self, name: str) -> Any:
        whole, rows, tokens = getattr(self._whole, name), self._rows, self._tokens
        if name in _TOKENS:
            part = whole[tokens]
            return part - rows.start if name == "token_to_req_indices" and rows.start else part
        if name == "paged_kv_indices":
            pages = self._whole.host.paged_kv_indptr
            return whole[int(pages[rows.start]) : int(pages[rows.stop])]
        if name == "cross_slot_mapping":
            slots = self._whole.host.encoder_query_start_loc
            return whole[int(slots[rows.start]) : int(slots[rows.stop])]
        if name in _LOCS:
            first = int(getattr(self._whole.host, name)[rows.start])
            part = whole[rows.start : rows.stop + 1]
            return part - first if first else part
        part = whole[rows]
        return part - tokens.start if name == "logits_indices" and tokens.start else part


class CrossStepMetadata(StepMetadata):
    """A step as its cross layers see it: ``block_table``, lengths and pages are the encoder's.

    Slots of the encoder tokens that run are ``cross_slot_mapping``; there is no ``slot_mapping``.
    """

    max_seq_len = _count("max_encoder_seq_len")


class Owner(Protocol):
    """What metadata asks of the builder it belongs to."""

    @property
    def last_step(self) -> int: ...
    def _record(self, metadata: StepMetadata) -> None: ...
    def _replay(self, metadata: StepMetadata, graph: Any) -> None: ...
    def _abandon(self, metadata: StepMetadata) -> None: ...


def step_metadata(
    arena: Any, views: Views, batch: InputBatch, wraps: Mapping[str, Wrap], owner: Owner, extra: Mapping[str, str],
    device: Views | None = None, side: DeviceSide | None = None, *, padded: bool = False,
) -> StepMetadata:  # fmt: skip
    """The metadata of steps in ``arena``, whose arrays are ``views``; ``wraps`` by group name.

    ``device``: the arrays at fixed addresses that its fields are then made of, for a captured graph (``padded``) and on
    a device with its own memory, whose tables are those of ``side``.
    """
    groups: dict[str, StepMetadata] = {}
    for index, group in enumerate(batch.groups):
        wrap, tables = wraps[group.name], {"block_table": batch._tables[group.name]}
        if batch._cross is not None:
            tables["cross_block_table"] = batch._cross
        fields = _fields_of(views, index, group.cross, batch._cross is not None)
        on_device = pages = buffer = None
        if device is not None:
            on_device = _fields_of(device, index, group.cross, batch._cross is not None)
            if side is None:
                on_device = {name: wrap(array) for name, array in on_device.items()}
        if side is not None and on_device is not None:
            on_device["block_table"], pages = side.tables[index], partial(side.pages_of, index)
            buffer = partial(side.page_buffer, index)
            if batch._cross is not None:
                on_device["cross_block_table"] = side.tables[-1]
        kind = CrossStepMetadata if group.cross else StepMetadata
        groups[group.name] = kind(
            arena, group.name, fields, tables, batch._rows, wrap, on_device, pages, buffer, owner, extra, padded=padded
        )
    first = groups[batch.groups[0].name]
    for metadata in groups.values():
        metadata.groups = groups
    return first


def _fields_of(views: Views, index: int, cross: bool, has_cross: bool) -> dict[str, Any]:
    fields = views.fields | views.groups[index]
    if has_cross:
        fields["cross_slot_mapping"] = views.groups[-1]["slot_mapping"]
    if cross:  # the keys of a cross group are the encoder's, and its slots those of the encoder tokens
        for name in ("slot_mapping", "prefill_seq_start_loc"):
            del fields[name]
        fields |= {name: views.fields[encoder] for name, encoder in _LENGTHS_OF_CROSS.items()}
    return fields
