"""ReadOnly: the memory of an array for readers alone (see kernels/cython/read_only.pxi)."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


class ReadOnly:
    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], True)}
