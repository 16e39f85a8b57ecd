"""The kernels of the hot path: which implementation is used, and why.

Two implementations have the same topics, classes and functions: ``attncore._slots`` (Cython, compiled into wheels from
``kernels/cython``) and ``attncore.kernels.numba`` (for a platform without a compiler). :func:`load_kernels` chooses one
and :func:`why_kernels` says why. ``codes`` declares the numbers that they share with Python; ``host_functions`` has
functions on host arrays. ``prepared_launch`` launches kernels of Triton, on a device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any, Literal

from attncore.arguments import one_of
from attncore.env import kernels as asked_for

KernelsName = Literal["cython", "numba"]

_OFF = "NUMBA_DISABLE_JIT"
"""The environment variable by which numba compiles nothing."""
_MODULES = {"cython": "attncore._slots", "numba": "attncore.kernels.numba"}


def load_kernels(name: KernelsName | None = None) -> Any:
    """The module of kernels: the named one, else that of ``ATTNCORE_KERNELS``, else Cython, else numba.

    Raises ValueError for an unknown name, and ImportError where the requested module, or either, cannot be imported.
    """
    asked = name or asked_for()
    if asked is not None:
        wanted = one_of("kernels", asked, _MODULES)
        try:
            return importlib.import_module(_MODULES[wanted])
        except Exception as error:
            raise ImportError(
                f"kernels: {wanted} was asked for and cannot be imported: {_text(wanted, error)}; {_how_to_get(wanted)}"
            ) from error
    failures = []
    for candidate, module in _MODULES.items():
        try:
            return importlib.import_module(module)
        except Exception as error:  # a library that is there and broken raises whatever it likes
            failures.append(f"{candidate}: {_text(candidate, error)}")
    raise ImportError(
        f"kernels: none can be imported ({'; '.join(failures)}); {_how_to_get('cython')}; or {_how_to_get('numba')}"
    )


def lacking_kernels() -> str:
    """What of the kernels cannot be found; empty where those of ``ATTNCORE_KERNELS`` are there, or any without it.

    None are imported, which takes long: those that are found may fail yet, and a name that is none is not judged.
    """
    found = {"cython": _MODULES["cython"], "numba": "numba"}
    asked = asked_for()
    if asked in found:
        return "" if _can_be_found(found[asked]) else f"those of {asked}, which ATTNCORE_KERNELS asks for"
    return "" if any(map(_can_be_found, found.values())) else "the compiled extension, and numba in its place"


@functools.cache
def _can_be_found(module: str) -> bool:
    """Looked for once: Python loses a signal that arrives while it drops the lock of an import."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # what stands in its place in sys.modules says nothing of where it came from
        return True


def _how_to_get(name: str) -> str:
    from attncore.how_to_install import compile_extension, install_extra  # reads the installation: only for an error

    if name == "numba":
        return f"unset {_OFF}" if _numba_is_off() else install_extra("numba")
    return compile_extension()


def _numba_is_off() -> bool:
    """Whether numba has been told to leave functions as they are, which the kernels cannot be run as."""
    return bool(getattr(getattr(sys.modules.get("numba"), "config", None), "DISABLE_JIT", False))


def _text(name: str, error: Exception) -> str:
    if name == "numba" and _numba_is_off():
        return f"numba compiles nothing where {_OFF} is set"
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"


def why_kernels(name: KernelsName | None = None) -> str:
    """One sentence: which implementation is used and why; for numba also why it has no cache, where it has none."""
    kernels = load_kernels(name)
    if name:
        why = "asked for by the caller"
    elif asked_for():
        why = "asked for by ATTNCORE_KERNELS"
    elif kernels.IMPLEMENTATION == "cython":
        why = f"the compiled extension is installed (reads Python ints by {kernels.READS_INTS})"
    else:
        why = "the compiled extension is not installed"
    if kernels.IMPLEMENTATION == "numba":
        from attncore.kernels.numba.jit import cache_problem

        why += (
            f"; compiled anew in each process, for it has no cache ({problem})" if (problem := cache_problem()) else ""
        )
    return f"{kernels.IMPLEMENTATION}: {why}"
