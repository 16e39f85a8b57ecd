"""The tensors that an engine gives for a step on the device. Errors begin with the argument's name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attncore.array_arguments import beyond_its_memory
from attncore.show import counted

_INT32, _INT64, _TENSOR = torch.int32, torch.int64, torch.Tensor

DTYPES = {"query_start_loc": _INT32, "seq_lens": _INT32, "block_table": _INT32, "slot_mapping": _INT64}
"""The tensors of a step, all on the device."""

_SHAPES = {
    "query_start_loc": "int32[n + 1]",
    "seq_lens": "int32[n]",
    "block_table": "int32[n, columns]",
    "slot_mapping": "int64[T]",
}


class Given(NamedTuple):
    """The device tensors of one step, checked: n rows, T tokens."""

    query_start_loc: torch.Tensor
    """int32[n + 1]"""
    seq_lens: torch.Tensor
    """int32[n]"""
    block_table: torch.Tensor
    """int32[n, columns], of any row stride."""
    slot_mapping: torch.Tensor
    """int64[T]"""

    def cut(self, num_reqs: int, num_tokens: int) -> Given:
        """The first rows and tokens alone."""
        starts, lengths, table, slots = self
        if lengths.shape[0] != num_reqs:
            starts, lengths, table = starts[: num_reqs + 1], lengths[:num_reqs], table[:num_reqs]
        return Given(starts, lengths, table, slots if slots.shape[0] == num_tokens else slots[:num_tokens])

    def alias(self) -> Given:
        """Tensors of our own over the same memory: an engine may lead its own elsewhere at any time (``t.data =``)."""
        starts, lengths, table, slots = self
        return Given(starts.detach(), lengths.detach(), table.detach(), slots.detach())

    def lies_at(self, place: tuple[Any, ...]) -> bool:
        """Whether these still lie at the addresses that ``place`` begins with: torch may have moved the memory that
        they share with others.
        """
        starts, lengths, table, slots = self
        at: tuple[int, ...] = place[:4]
        return (starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), slots.data_ptr()) == at


class Place(NamedTuple):
    """What tells the tensors of one step from those of another: memory, sizes and strides."""

    starts: int
    lengths: int
    table: int
    slots: int
    """Addresses, in the order of Given."""
    num_reqs: int
    table_shape: tuple[int, ...]
    table_stride: tuple[int, ...]
    num_slots: int

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie."""
        return self[:4]

    @property
    def rows(self) -> tuple[Any, ...]:
        """That of the tensors of rows alone."""
        return (*self[:3], *self[4:7])


def facts_of_tensors(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that tells the tensors of one step from those of another: addresses, shapes, strides, dtypes, device indices.

    One address is on one kind of device. None where one is no plain tensor, or has no strides. Each attribute of a
    tensor is a call: here is each made once.
    """
    starts, lengths, table, slots = given
    if not (type(starts) is _TENSOR and type(lengths) is _TENSOR and type(table) is _TENSOR and type(slots) is _TENSOR):
        return None  # what a subclass says of itself is its own code
    try:
        return (
            starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), slots.data_ptr(),
            starts.shape, lengths.shape, table.shape, slots.shape,
            starts.stride(), lengths.stride(), table.stride(), slots.stride(),
            starts.dtype, lengths.dtype, table.dtype, slots.dtype,
            starts.get_device(), lengths.get_device(), table.get_device(), slots.get_device(),
        )  # fmt: skip
    except RuntimeError:  # a sparse tensor has no strides
        return None


def place_of(given: Given, facts: tuple[Any, ...] | None, device: torch.device) -> Place:
    """Where tensors of these facts lie and how large they are; ValueError or TypeError that names the first one that is
    wrong.
    """
    refused = _refused_one(given, device)
    if refused is not None:
        raise refused
    if facts is None:
        raise ValueError(f"query_start_loc: a step of tensors on {device} that cannot be read")
    (num_starts,), (num_reqs,), table_shape, (num_slots,) = facts[4:8]
    if num_starts != num_reqs + 1 or table_shape[0] != num_reqs:
        name, found = ("block_table", table_shape[0]) if num_starts == num_reqs + 1 else ("query_start_loc", num_starts)
        wanted = num_reqs + (name == "query_start_loc")
        raise ValueError(f"{name}: {counted(found, 'row')} found beside {num_reqs} seq_lens; give {wanted}")
    at = facts[0], facts[1], facts[2], facts[3]
    return Place(*at, num_reqs, table_shape, facts[10], num_slots)


def check_memory(given: Given) -> None:
    """ValueError that names a tensor which reaches beyond its memory."""
    for name, tensor in zip(DTYPES, given, strict=True):
        if beyond_its_memory(tensor):
            raise beyond(name, tensor)


def beyond(name: str, tensor: torch.Tensor) -> ValueError:
    """The error of a tensor that reaches beyond its memory."""
    return ValueError(
        f"{name}: shape {tuple(tensor.shape)} found, which reaches beyond the tensor's memory, as after a resize_ that "
        "torch refused; make it anew"
    )


def _refused_one(given: Given, device: torch.device) -> ValueError | TypeError | None:
    """The error of the first tensor that is wrong; None where none is."""
    for name, tensor in zip(DTYPES, given, strict=True):
        right = type(tensor) is _TENSOR and tensor.dtype is DTYPES[name] and tensor.device == device
        right = right and tensor.layout is torch.strided and not tensor.is_nested
        if not right or tensor.dim() != 1 + (name == "block_table"):
            return _refused(name, tensor, device)
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:  # NumPy gives none to no elements
            return _refused(name, tensor, device)
    return None


def _refused(name: str, tensor: Any, device: torch.device) -> ValueError | TypeError:
    wanted = f"{_SHAPES[name]} on {device}"
    if type(tensor) is not torch.Tensor:
        return TypeError(f"{name}: {type(tensor).__name__} found; give a torch tensor {wanted}")
    found = f"{shape_text(tensor)} on {tensor.device}"
    strided = tensor.layout is torch.strided and not tensor.is_nested
    if strided and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        found += f" with strides {tensor.stride()}, whose elements (of a row) do not lie side by side"
    return ValueError(f"{name}: {found} found; give {wanted}")


def shape_text(tensor: torch.Tensor) -> str:
    """dtype and shape of a tensor as an error says them."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"nested {dtype}" if tensor.is_nested else f"{dtype}{list(tensor.shape)}"  # a nested one has no shape
