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
    return np.asarray(shown(array))


def shown(array: npt.NDArray[Any]) -> Any:
    """What ``numpy.asarray`` makes such arrays of, again and again."""
    return _exporter()(array)


@cache
def _exporter() -> Any:
    return load_kernels().ReadOnly
