"""The host arrays that an engine gives for a step. Errors begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from attncore import arguments
from attncore.array_arguments import beyond_its_memory, check_readable
from attncore.builder.adopted.given import Given, beyond, shape_text
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.adopted.settings import Facts, Settings

Int32Array = npt.NDArray[np.int32]

_INT32, _TENSOR, _ARRAY = torch.int32, torch.Tensor, np.ndarray
_SIDE_BY_SIDE = (1,)
_HOST_INT32 = np.dtype(np.int32)
_MOST_KEPT = 8
"""Tensors whose memory is kept: an engine has one buffer, or one for each step that is under way."""


class HostGiven:
    """One argument, an array int32[k] or a tensor on the CPU, as an array over the same memory.

    An array of a tensor takes torch long to make, so that those of an engine's buffers are kept, by address. An array
    keeps the memory that it was made of where it is: torch resizes none that NumPy has seen.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept: dict[int, Int32Array] = {}

    def array(self, given: Any) -> Int32Array:
        """``given`` as an array; ValueError or TypeError that names the argument where it is none."""
        if type(given) is _TENSOR:
            try:
                kept = self._kept.get(given.data_ptr())
            except RuntimeError:  # a sparse one has no address
                raise self._refused(given) from None
            if kept is not None and given.dtype is _INT32 and given.stride() == _SIDE_BY_SIDE and given.is_cpu:
                (count,) = given.shape
                if count == len(kept):
                    return kept
                if count < len(kept):
                    return kept[:count]
            return self._of_tensor(given)
        if type(given) is _ARRAY and given.dtype is _HOST_INT32 and given.ndim == 1 and given.flags.aligned:
            return given
        if not isinstance(given, np.ndarray):
            raise TypeError(
                f"{self.name}: {type(given).__name__} found; give int32, a NumPy array or a tensor on the CPU"
            )
        check_readable(self.name, given)
        array = np.asarray(given)  # of a subclass, which may say anything of itself, the plain array
        if array.dtype != _HOST_INT32 or array.dtype.names is not None or array.ndim != 1:
            raise self._refused(given)  # one whose parts have names equals int32, but is none to compiled code
        return self._aligned(array, given)

    def _of_tensor(self, given: torch.Tensor) -> Int32Array:
        try:
            own = given.detach()  # an engine may lead its own elsewhere at any time (``t.data =``)
            array: Int32Array = own.numpy()
        except (TypeError, RuntimeError):  # on a device, sparse, bfloat16
            raise self._refused(given) from None
        if array.dtype != _HOST_INT32 or array.ndim != 1:
            raise self._refused(given)
        if beyond_its_memory(own):
            raise beyond(self.name, own)
        self._aligned(array, given)
        if len(array) and own.stride() == _SIDE_BY_SIDE:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[own.data_ptr()] = array
        return array

    def _aligned(self, array: Int32Array, given: Any) -> Int32Array:
        if not array.flags.aligned:  # compiled code reads whole numbers at their addresses
            raise self._refused(given, " that is not aligned")
        return array

    def _refused(self, given: Any, what: str = "") -> ValueError:
        if isinstance(given, torch.Tensor):
            kind, where = shape_text(given), f" on {given.device}"
        else:
            kind, where = f"{given.dtype}{list(given.shape)}", ""
        return ValueError(
            f"{self.name}: {kind}{where}{what} found; give int32[n], a NumPy array or a tensor on the CPU"
        )


class HostStarts(HostGiven):
    """``host_query_start_loc``."""

    def __init__(self) -> None:
        super().__init__("host_query_start_loc")

    def of(self, num_reqs: int, host: Any, own: torch.Tensor | None) -> Int32Array:
        """The starts of so many rows; ``own``, the device's where the host can read it, is taken for missing ones."""
        host = own if host is None else host
        if host is None:
            raise ValueError(
                "host_query_start_loc: not given; the device's is not read, for that would wait: give the engine's own "
                "on the host"
            )
        array = self.array(host)
        if len(array) != num_reqs + 1:
            raise ValueError(f"{self.name}: {counted(len(array), 'element')} found beside {num_reqs + 1} on the device")
        return array


class HostLengths(HostGiven):
    """``host_seq_lens``, for a backend of these facts."""

    def __init__(self, facts: Facts) -> None:
        super().__init__("host_seq_lens")
        self._facts = facts

    def of(self, num_reqs: int, host: Any, own: torch.Tensor | None, bounded: bool) -> tuple[Int32Array | None, str]:
        """The lengths of so many rows, or None, and what they are: ``exact``, ``bounded`` or ``none``.

        ``own`` as for starts. ValueError where the backend needs more.
        """
        if bounded is not False:
            bounded = arguments.flag("bounded", bounded)
        if host is None and not bounded:
            host = own
        facts = self._facts
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
        array = self.array(host)
        if len(array) != num_reqs:
            raise ValueError(
                f"{self.name}: {counted(len(array), 'length')} found for {counted(num_reqs, 'row')}; give one each"
            )
        return array, "bounded" if bounded else "exact"


def check_agreement(starts: Int32Array, lengths: Int32Array | None, known: str, own: tuple[Any, ...]) -> None:
    """ValueError where the host's arrays say another step than ``own``, the tensors of starts and lengths, on a CPU.

    ``known`` as ``HostLengths.of`` says it: upper bounds are no shorter than the lengths. Rows without tokens, such as
    padded ones, are not compared: nothing reads their keys.
    """
    own_starts, own_lengths = (tensor.clone().numpy() for tensor in own)  # torch resizes no memory that NumPy has seen
    if (starts != own_starts).any():
        index = int(np.argmax(starts != own_starts))
        raise ValueError(
            f"host_query_start_loc: {starts[index]} found at index {index}, where query_start_loc has "
            f"{own_starts[index]}; give the same numbers on the host"
        )
    if lengths is None:
        return
    wrong = (lengths < own_lengths if known == "bounded" else lengths != own_lengths) & (starts[1:] > starts[:-1])
    if wrong.any():
        row = int(np.argmax(wrong))
        wanted = "upper bounds" if known == "bounded" else "the same numbers on the host"
        raise ValueError(
            f"host_seq_lens: row {row} has {counted(lengths[row], 'key')}, and {own_lengths[row]} in seq_lens; give "
            f"{wanted}"
        )


def check_blocks(given: Given, settings: Settings) -> None:
    """ValueError where a table on a CPU names a block that the cache has not, for a key of a row with tokens."""
    starts, lengths, table = (tensor.clone().numpy() for tensor in given[:3])
    columns = np.where(starts[1:] > starts[:-1], -(-lengths // settings.block_size), 0)
    held = np.arange(table.shape[1]) < columns[:, np.newaxis]
    wrong = held & ((table < 0) | (table >= settings.blocks_bound))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_table: row {row} names block {table[row, column]} in column {column}, but the cache holds "
            f"{counted(settings.blocks_bound, 'block')}"
        )
