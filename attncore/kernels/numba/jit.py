"""The decorator that compiles the loops, with a cache that follows every file of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from attncore.kernels import codes


def jit(function: Callable[..., Any]) -> Any:
    """The function, compiled by numba at first use and kept in its cache."""
    compiled: Any = njit(cache=True, nogil=False, boundscheck=False)(function)
    # numba compiles a function again where its own file has changed. What is called from another file, and the numbers
    # of codes, are compiled into it too: the cache must see a change in any of these files.
    compiled._cache._cache_file._source_stamp = _STAMP
    return compiled


def _stamp() -> tuple[tuple[str, float, int], ...]:
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(codes.__file__)]
    return tuple((file.name, file.stat().st_mtime, file.stat().st_size) for file in files)


_STAMP = _stamp()
