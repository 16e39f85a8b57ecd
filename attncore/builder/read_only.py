"""Host arrays as callers get them: read-only, for the memory is the builder's, and later steps are written to it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.kernels import load_kernels


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements as an array that cannot be written to, nor made writable.

    A view of NumPy's own may be made writable again wherever its base is, and a memoryview gives its array away. Each
    call gives an array of its own: one whose shape is changed changes no other.
    """
    shown: npt.NDArray[Any] = np.asarray(_exporter()(array))
    if shown.dtype.hasobject:  # NumPy takes a buffer that it has no memory to describe for an object
        raise MemoryError("no memory for a view of an array")
    return shown


def kept(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array whose ``view()`` is such an array, in a quarter of the time: the base of each is not it, but one below.

    NumPy goes down a chain of views for a base. What is set on that one is therefore not what later views have.
    """
    return read_only(array).view()


@cache
def _exporter() -> Any:
    return load_kernels().ReadOnly
