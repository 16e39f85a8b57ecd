"""What an engine gives for a step: tensors on the device, and host arrays. Errors begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attncore import arguments
from attncore.array_arguments import beyond_its_memory

if TYPE_CHECKING:
    from attncore.builder.adopted.settings import Facts

_INT32, _INT64, _TENSOR = torch.int32, torch.int64, torch.Tensor
_SIDE_BY_SIDE = ((1,), (1,), (1,))
_HOST_INT32 = np.dtype(np.int32)

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

    def lies_at(self, place: Place) -> bool:
        """Whether these still lie where they lay: torch may have moved the memory that they share with others."""
        starts, lengths, table, slots = self
        return (
            starts.data_ptr() == place[0]
            and lengths.data_ptr() == place[1]
            and table.data_ptr() == place[2]
            and slots.data_ptr() == place[3]
        )


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


def place_of(given: Given, device: torch.device) -> Place:
    """Where the tensors lie and how large they are; ValueError or TypeError that names the first one that is wrong."""
    starts, lengths, table, slots = given
    for tensor in given:  # each attribute of a tensor is a call: they are asked for once
        if type(tensor) is not _TENSOR or tensor.device != device:
            raise _refused_one(given, device)  # what a subclass says of itself is its own code
    if not (starts.dtype is _INT32 and lengths.dtype is _INT32 and table.dtype is _INT32 and slots.dtype is _INT64):
        raise _refused_one(given, device)
    if table.layout is not torch.strided:
        raise _refused_one(given, device)
    try:
        strides, table_stride = (starts.stride(), lengths.stride(), slots.stride()), table.stride()
    except RuntimeError:  # a sparse tensor has none
        raise _refused_one(given, device) from None
    shapes, table_shape = (starts.shape, lengths.shape, slots.shape), table.shape
    usual = strides == _SIDE_BY_SIDE and len(table_shape) == 2 and table_stride[1] == 1
    if not usual and not _side_by_side(given):
        raise _refused_one(given, device)
    (num_starts,), (num_reqs,), (num_slots,) = shapes
    if num_starts != num_reqs + 1 or table_shape[0] != num_reqs:
        name, found = ("block_table", table_shape[0]) if num_starts == num_reqs + 1 else ("query_start_loc", num_starts)
        wanted = num_reqs + (name == "query_start_loc")
        raise ValueError(f"{name}: {found} rows found beside {num_reqs} seq_lens; give {wanted}")
    return Place(
        starts.data_ptr(), lengths.data_ptr(), table.data_ptr(), slots.data_ptr(),
        num_reqs, table_shape, table_stride, num_slots,
    )  # fmt: skip


def check_memory(given: Given) -> None:
    """ValueError that names a tensor which reaches beyond its memory."""
    for name, tensor in zip(DTYPES, given, strict=True):
        if beyond_its_memory(tensor):
            raise _beyond(name, tensor)


def _beyond(name: str, tensor: torch.Tensor) -> ValueError:
    return ValueError(
        f"{name}: shape {tuple(tensor.shape)} found, which reaches beyond the tensor's memory, as after a resize_ that "
        "torch refused; make it anew"
    )


def _side_by_side(given: Given) -> bool:
    """Whether they have the right dimensions, and elements (of a row) that lie side by side where there are several."""
    return all(
        tensor.dim() == 1 + (name == "block_table") and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
        for name, tensor in zip(DTYPES, given, strict=True)
    )


def _refused_one(given: Given, device: torch.device) -> ValueError | TypeError:
    """The error of the first tensor that is wrong."""
    for name, tensor in zip(DTYPES, given, strict=True):
        right = type(tensor) is torch.Tensor and tensor.dtype is DTYPES[name] and tensor.device == device
        if not right or tensor.layout is not torch.strided or tensor.dim() != 1 + (name == "block_table"):
            return _refused(name, tensor, device)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return _refused(name, tensor, device)
    return ValueError(f"query_start_loc: a step of tensors on {device} that cannot be read")


def _refused(name: str, tensor: Any, device: torch.device) -> ValueError | TypeError:
    wanted = f"{_SHAPES[name]} on {device}"
    if type(tensor) is not torch.Tensor:
        return TypeError(f"{name}: {type(tensor).__name__} found; give a torch tensor {wanted}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = f"{dtype}{list(tensor.shape)} on {tensor.device}"
    if tensor.layout is torch.strided and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        found += f" with strides {tensor.stride()}, whose elements (of a row) do not lie side by side"
    return ValueError(f"{name}: {found} found; give {wanted}")


def _host_array(name: str, given: Any) -> npt.NDArray[np.int32]:
    """A host array int32[k] of an engine, which may be a tensor on the CPU, without a copy.

    ValueError or TypeError that names it where it is none.
    """
    array: npt.NDArray[np.int32] | None
    if type(given) is _TENSOR:
        try:
            array = given.numpy()
        except (TypeError, RuntimeError):  # on a device, sparse, bfloat16
            array = None
        if array is not None and (array.dtype != _HOST_INT32 or array.ndim != 1):
            array = None
        elif array is not None and len(array):
            last = given.storage_offset() * 4 + (len(array) - 1) * array.strides[0]
            if last + 4 > given.untyped_storage().nbytes():
                raise _beyond(name, given)
    elif isinstance(given, np.ndarray):
        plain = given if type(given) is np.ndarray else np.asarray(given)
        dtype = plain.dtype  # with names it equals int32, but is none to compiled code
        array = plain if dtype == _HOST_INT32 and dtype.names is None and plain.ndim == 1 else None
    else:
        raise TypeError(f"{name}: {type(given).__name__} found; give int32, a NumPy array or a tensor on the CPU")
    if array is not None and array.flags.aligned:  # compiled code reads whole numbers at their addresses
        return array
    kind = f"{given.dtype}{list(given.shape)}".removeprefix("torch.")
    where = f" on {given.device}" if isinstance(given, torch.Tensor) else ""
    where += " that is not aligned" if array is not None else ""
    raise ValueError(f"{name}: {kind}{where} found; give int32[n], a NumPy array or a tensor on the CPU")


def host_starts(place: Place, host: Any, own: torch.Tensor | None) -> npt.NDArray[np.int32]:
    """The host's query_start_loc; ``own``, the device's where the host can read it, is taken for a missing one."""
    host = own if host is None else host
    if host is None:
        raise ValueError(
            "host_query_start_loc: not given; the device's is not read, for that would wait: give the engine's own on "
            "the host"
        )
    array = _host_array("host_query_start_loc", host)
    if len(array) != place.num_reqs + 1:
        raise ValueError(f"host_query_start_loc: {len(array)} elements found beside {place.num_reqs + 1} on the device")
    return array


def host_lengths(
    place: Place, host: Any, own: torch.Tensor | None, bounded: bool, facts: Facts
) -> tuple[npt.NDArray[np.int32] | None, str]:
    """The host's lengths, or None, and what they are: ``exact``, ``bounded`` or ``none``.

    ValueError where the backend needs more.
    """
    if bounded is not False:
        bounded = arguments.flag("bounded", bounded)
    if host is None and not bounded:
        host = own
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
            f"bounded: backend {facts.name!r} needs exact lengths on the host (host_lengths 'exact' in its spec); give "
            "them, which an engine that drafts asynchronously cannot, or choose a backend that takes bounds"
        )
    array = _host_array("host_seq_lens", host)
    if len(array) != place.num_reqs:
        raise ValueError(f"host_seq_lens: {len(array)} lengths found for {place.num_reqs} rows; give one each")
    return array, "bounded" if bounded else "exact"
