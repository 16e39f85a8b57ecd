"""Makes the metadata of a StepShape: one object for each KV-cache group over an arena, with its device arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attncore.builder.device.arena import Views
from attncore.builder.fields import Field
from attncore.builder.metadata import Wrap
from attncore.builder.persistent.state_step import StateStep
from attncore.builder.persistent.step_metadata import (
    CrossStepAtCapture,
    CrossStepMetadata,
    HostCrossStepMetadata,
    HostStepMetadata,
    Owner,
    StepAtCapture,
    StepMetadata,
)
from attncore.builder.read_only import read_only

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.persistent.batch_core import BatchCore

_CLASSES = {
    (False, False): StepMetadata,
    (True, False): CrossStepMetadata,
    (False, True): HostStepMetadata,
    (True, True): HostCrossStepMetadata,
}
"""The class of metadata, by whether the group is a cross group and whether its fields are those of the host."""

CLASSES_AT_CAPTURE = {(False, False): StepAtCapture, (True, False): CrossStepAtCapture}
"""The same of what a stand-in graph on the CPU was captured over."""

_LENGTHS_OF_CROSS = {"seq_lens": "encoder_seq_lens", "seq_start_loc": "encoder_seq_start_loc"}


def step_metadata(
    arena: Any, views: Views, core: BatchCore, wraps: Mapping[str, Wrap], owner: Owner, extra: Mapping[str, Field],
    device: Views | None = None, side: CopyTransport | None = None, *, padded: bool = False,
    classes: Mapping[tuple[bool, bool], type[StepMetadata]] = _CLASSES,
) -> StepMetadata:  # fmt: skip
    """The metadata of steps in ``arena``, whose arrays are ``views``; ``wraps`` are the backends' wraps by group name.

    ``device``, for a captured graph (``padded``) and for a device with its own memory, has the arrays at fixed
    addresses that the fields are views of; ``side`` is the transport whose device tables the metadata shows.
    """
    groups: dict[str, StepMetadata] = {}
    for index, group in enumerate(core.groups):
        wrap, tables = wraps[group.name], {"block_table": core.tables[group.name]}
        if core.cross is not None:
            tables["cross_block_table"] = core.cross
        arrays = _arrays_of(views, index, group.cross, core.cross is not None)
        on_device = pages = buffer = None
        if device is not None:
            on_device = _arrays_of(device, index, group.cross, core.cross is not None)
            if side is None and wrap is not read_only:
                on_device = {name: wrap(array) for name, array in on_device.items()}
        if side is not None and on_device is not None:
            on_device["block_table"], pages = side.tables.tensors[index], partial(side.pages_of, index)
            buffer = partial(side.page_buffer, index)
            if core.cross is not None:
                on_device["cross_block_table"] = side.tables.tensors[-1]
        metadata_class = classes[group.cross, wrap is read_only and on_device is None]
        groups[group.name] = metadata_class(
            arena,
            group.name,
            arrays,
            tables,
            core.state,
            wrap,
            on_device,
            pages,
            buffer,
            owner,
            extra,
            side,
            padded=padded,
        )
    first = groups[core.groups[0].name]
    for metadata in groups.values():
        vars(metadata)["groups"] = MappingProxyType(groups)
        vars(metadata)["states"] = MappingProxyType({name: StateStep(metadata, name) for name in core.states})
    arena.views = tuple(views for metadata in groups.values() for views in metadata.views())
    return first


def _arrays_of(views: Views, index: int, cross: bool, has_cross: bool) -> dict[str, Any]:
    arrays = views.fields | views.groups[index]
    if has_cross:
        arrays["cross_slot_mapping"] = views.groups[-1]["slot_mapping"]
    if cross:  # a cross group has the encoder's keys, and the slots of the encoder tokens
        for name in ("slot_mapping", "prefill_seq_start_loc"):
            del arrays[name]
        arrays |= {name: views.fields[encoder] for name, encoder in _LENGTHS_OF_CROSS.items()}
    return arrays
