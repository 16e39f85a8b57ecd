"""The kernels of the hot path: which implementation is used, and why.

Two implementations have the same topics, classes and functions: ``attncore._slots`` (Cython, compiled into wheels from
``kernels/cython``) and ``attncore.kernels.numba`` (for a platform without a compiler). :func:`load_kernels` chooses one
and :func:`why_kernels` says why. ``codes`` declares the numbers that they share with Python; ``host_functions`` has
functions on host arrays.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from attncore import env

KernelsName = Literal["cython", "numba"]

_MODULES: dict[KernelsName, str] = {"cython": "attncore._slots", "numba": "attncore.kernels.numba"}


def load_kernels(name: KernelsName | None = None) -> Any:
    """The module of kernels: the named one, else that of ``ATTNCORE_KERNELS``, else Cython, else numba.

    Raises ValueError for an unknown name, and ImportError where the requested module, or either, cannot be imported.
    """
    wanted = name or env.kernels()
    if wanted is not None:
        if wanted not in _MODULES:
            raise ValueError(f"kernels: {wanted!r} is not one of {', '.join(_MODULES)}")
        try:
            return importlib.import_module(_MODULES[wanted])
        except ImportError as error:
            raise ImportError(f"kernels: {wanted} was asked for and cannot be imported: {error}") from error
    failures = []
    for candidate, module in _MODULES.items():
        try:
            return importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{candidate}: {error}")
    raise ImportError(
        f"kernels: none can be imported ({'; '.join(failures)}); reinstall attncore with a C compiler, "
        "or pip install attncore[numba]"
    )


def why_kernels(name: KernelsName | None = None) -> str:
    """One sentence: which implementation is used and why."""
    kernels = load_kernels(name)
    if name:
        return f"{kernels.IMPLEMENTATION}: asked for by the caller"
    if env.kernels():
        return f"{kernels.IMPLEMENTATION}: asked for by ATTNCORE_KERNELS"
    if kernels.IMPLEMENTATION == "cython":
        return f"cython: the compiled extension is installed (reads Python ints by {kernels.READS_INTS})"
    return "numba: the compiled extension is not installed"
