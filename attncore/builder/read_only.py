"""Host arrays as callers get them: read-only, for the memory is the builder's, and later steps are written to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class _Shown:
    """Shows the memory of an array to NumPy as read-only, and keeps the array."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], True)}
        self._kept = array


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same elements as a view that cannot be written to, nor made writable: none of its bases is writable.

    Each call gives a base of its own: a base whose shape is changed changes no other view.
    """
    return np.asarray(_Shown(array))[...]
