"""Host arrays as callers get them: read-only, for the memory is the builder's, and later steps are written to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements as an array that cannot be written to, nor made writable.

    Its base is a read-only memoryview: a view of NumPy's own may be made writable again wherever its base is. Each call
    gives an array of its own: one whose shape is changed changes no other.
    """
    return np.asarray(memoryview(array).toreadonly())  # type: ignore[arg-type]
