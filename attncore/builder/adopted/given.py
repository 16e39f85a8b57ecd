"""What an engine gives for a step: tensors on the device, and host arrays. Errors begin with the argument's name."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

DTYPES = {
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "block_table": torch.int32,
    "slot_mapping": torch.int64,
}
"""The tensors of a step, all on the device."""


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
        if len(lengths) != num_reqs:
            starts, lengths, table = starts[: num_reqs + 1], lengths[:num_reqs], table[:num_reqs]
        return Given(starts, lengths, table, slots if len(slots) == num_tokens else slots[:num_tokens])

    def places(self) -> tuple[Any, ...]:
        """What tells these tensors from others: memory, sizes and strides."""
        return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in self)

    def addresses(self) -> tuple[int, ...]:
        """Where they lie."""
        return tuple(tensor.data_ptr() for tensor in self)


def check_given(given: Given, device: torch.device) -> None:
    """ValueError or TypeError that names the first tensor whose dtype, place, layout or size is wrong."""
    for name, tensor in zip(DTYPES, given, strict=True):
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype is not DTYPES[name]
            or tensor.device != device
            or tensor.layout is not torch.strided
            or tensor.dim() != (2 if name == "block_table" else 1)
            or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
        ):
            raise _refused(name, tensor, device)
    rows = len(given.seq_lens)
    for name, tensor, wanted in (
        ("query_start_loc", given.query_start_loc, rows + 1),
        ("block_table", given.block_table, rows),
    ):
        if len(tensor) != wanted:
            raise ValueError(f"{name}: {len(tensor)} rows found beside {rows} seq_lens; give {wanted}")


def _refused(name: str, tensor: Any, device: torch.device) -> ValueError | TypeError:
    wanted = f"{str(DTYPES[name]).removeprefix('torch.')}{'[n, columns]' if name == 'block_table' else '[n]'} on {device}"
    if not isinstance(tensor, torch.Tensor):
        return TypeError(f"{name}: {type(tensor).__name__} found; give a torch tensor {wanted}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = f"{dtype}{list(tensor.shape)} on {tensor.device}"
    if tensor.layout is torch.strided and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        found += f" with strides {tensor.stride()}, whose elements (of a row) do not lie side by side"
    return ValueError(f"{name}: {found} found; give {wanted}")


def host_array(name: str, given: Any) -> npt.NDArray[np.int32]:
    """A host array int32[k] of an engine, which may be a tensor on the CPU, without a copy.

    ValueError or TypeError that names it where it is none.
    """
    if isinstance(given, torch.Tensor):
        if given.dtype is torch.int32 and given.dim() == 1 and given.is_cpu and given.layout is torch.strided:
            array: npt.NDArray[np.int32] = given.numpy()
            return array
        found = f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)} on {given.device}"
    elif isinstance(given, np.ndarray):
        if given.dtype == np.int32 and given.dtype.isnative and given.ndim == 1 and given.flags.aligned:
            return given
        found = f"{given.dtype}{list(given.shape)}"
    else:
        raise TypeError(f"{name}: {type(given).__name__} found; give int32, a NumPy array or a tensor on the CPU")
    raise ValueError(f"{name}: {found} found; give int32[n], a NumPy array or a tensor on the CPU")
