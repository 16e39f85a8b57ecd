"""The decorator that compiles the loops, with a cache that follows every file of the kernels.

Without a cache the loops are compiled anew in each process, which takes a minute, and a warning says why. Where they
are compiled for the first time, a line of the log says that, and where they are kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from attncore.kept_files import cache_folder, check_folder, read_kept
from attncore.kernels import codes
from attncore.kernels.numba.library import (
    FunctionCache,
    IndexDataCacheFile,
    global_compiler_lock,
    njit,
    numba_version,
)
from attncore.quoted import quoted

MAX_BYTES = 1 << 26
"""Bytes of a compiled function."""

IN_TREE = Path(__file__).parent / "__pycache__"
"""What Python runs this package from: who may write to it needs no cache of numba's to run code."""

INSTALLED = Path(__file__).parents[3].name in ("site-packages", "dist-packages")
"""Whether this is no source tree. An installer may remove IN_TREE; what another one of this version has, is as good."""

# A child that is forked while another thread compiles would have the lock of a thread that it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )

logger = logging.getLogger("attncore")
_problems: list[str] = []
_told: list[str] = []


def jit(function: Callable[..., Any]) -> Any:
    """The function, compiled by numba at first use and kept in its cache."""
    compiled: Any = njit(nogil=False, boundscheck=False)(function)
    compiled.compile = _in_another_thread(compiled.compile)
    try:
        compiled._cache = _Cache(function)
    except Exception as error:  # no folder for it can be written to
        _tell(error)
    return compiled


class Entry:
    """A loop that Python calls with ints, compiled for one signature: at its first call, or before, by ``ready``."""

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self._compiled, self._signature, self._ready = jit(function), signature, False
        self._compiled._cache.of_entry = True  # no effect where there is no cache
        self.__doc__ = function.__doc__

    def ready(self) -> Any:
        """The compiled function itself, which is called sooner than this object."""
        if not self._ready:
            self._compile()
            self._compiled.disable_compile()  # of arrays of another layout, in the middle of a step
            self._ready = True
        return self._compiled

    def _compile(self) -> None:
        if self._compiled.signatures:  # a call before this one was interrupted
            return
        try:
            self._compiled.compile(self._signature)
        except RuntimeError:
            if not self._compiled.signatures:  # else another thread has compiled it meanwhile, and disabled it
                raise

    def __call__(self, *args: Any) -> Any:
        return self.ready()(*args)


def entry_point(signature: str) -> Callable[[Callable[..., Any]], Entry]:
    """Makes a function an Entry."""
    return lambda function: Entry(function, signature)


def _in_another_thread(compile_for: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_for``, out of reach of signals' handlers, which run in the main thread.

    A handler that raises (KeyboardInterrupt) in the middle of it leaves generators of numba's that are finished, and
    nothing is compiled in the process from then on. Here it raises when the function has been compiled.
    """

    def run(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # as what is compiled for another function
            return compile_for(*args)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(compile_for, *args).result()

    return run


def cache_problem() -> str:
    """Why the cache is not used, or was not for one of the functions; empty where it works."""
    return _problems[0] if _problems else ""


def _tell(error: Exception) -> None:
    """Warn of the first problem; the others have the same cause more often than not."""
    if not _problems:
        _problems.append(f"{type(error).__name__}: {error}")
        warnings.warn(
            f"numba's cache is not used, and the kernels are compiled anew, which takes a minute ({_problems[0]}); "
            "NUMBA_CACHE_DIR may name a folder for it",
            RuntimeWarning,
            stacklevel=3,
        )


def _tell_once(folder: str) -> None:
    """Say that a step's loops are compiled, which takes so long that a program seems to hang."""
    if not _told:
        _told.append(folder)
        logger.warning("numba compiles the kernels, which takes half a minute or so; they are kept in %s", folder)


@lru_cache(maxsize=1)
def _folder() -> Path:
    """The folder of the cache, made where it is missing: below NUMBA_CACHE_DIR, else IN_TREE or the user's.

    An installation has the user's first, which is the same one for all that were made of the same files. It is not
    asked of numba, whose settings may be of a file in the current folder. ValueError for a NUMBA_CACHE_DIR that is
    relative, which would be such a file's neighbour; OSError where the folder cannot be written to.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    if not named:
        places: list[Callable[[], Path]] = [lambda: IN_TREE, lambda: cache_folder("kernels") / _name_of_files()]
        first, second = reversed(places) if INSTALLED else places
        try:
            return _writable(first())
        except (OSError, RuntimeError):
            return _writable(second())
    if not os.path.isabs(named):
        raise ValueError(f"NUMBA_CACHE_DIR: {quoted(named)} is relative to the current folder; give its whole path")
    return _writable(Path(named) / _name_of_files())


def _name_of_files() -> str:
    """A folder's name for what is compiled of these files, by this Python and this numba."""
    made_by = sys.implementation.cache_tag, numba_version, _stamp()
    return f"numba_{hashlib.sha256(repr(made_by).encode()).hexdigest()[:40]}"


def _writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


class _Place(FunctionCache._impl_class):  # type: ignore[misc, valid-type]
    """Which files are of a function, as numba names them, in a folder of our choice. It is numba's "locator", too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = function.__code__
        self._locator, self._py_file, self._lineno = self, code.co_filename, code.co_firstlineno
        name = f"{Path(code.co_filename).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))

    def get_cache_path(self) -> str:
        return str(_folder())

    def ensure_cache_path(self) -> None:
        _writable(_folder())

    def get_source_stamp(self) -> tuple[tuple[str, str], ...]:
        return _stamp()

    def get_disambiguator(self) -> str:
        return str(self._lineno)


class _Cache(FunctionCache):
    """numba's cache of one function; what goes wrong with it is told, and the function compiled."""

    _impl_class = _Place
    of_entry = False
    """Whether a program waits for this one, and for those that it calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        folder = Path(self._cache_path)
        if not any(folder.iterdir()):  # numba has made it, for the group too where the umask says so
            folder.chmod(folder.stat().st_mode & 0o755)
        self._cache_file = _CheckedFiles(self._cache_path, self._impl.filename_base, _stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            _tell(error)
            return None
        if found is None and self.of_entry:
            _tell_once(self._cache_path)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _tell(error)


class _CheckedFiles(IndexDataCacheFile):
    """The files of one function's cache, each behind a digest of what it holds.

    numba runs what is in them. One that is damaged, or that another user may have written, is as good as none.
    """

    def _load_index(self) -> dict[Any, str]:
        version, stamp, names = self._load(Path(self._index_path)) or (None, None, {})
        return names if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, names: dict[Any, str]) -> None:
        self._save(self._index_path, (self._version, self._source_stamp, names))

    def _load_data(self, name: str) -> Any:
        return self._load(Path(self._data_path(name)))

    def _save_data(self, name: str, data: Any) -> None:
        self._save(self._data_path(name), data)

    def _load(self, file: Path) -> Any:
        try:
            if file.parent != IN_TREE:
                check_folder(file.parent)
            whole = read_kept(file, MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            _tell(error)
            return None
        digest, data = whole[:32], whole[32:]
        if hashlib.sha256(data).digest() != digest:
            return None  # written again when the function has been compiled
        return pickle.loads(data)

    def _save(self, path: str, value: Any) -> None:
        data = self._dump(value)
        with self._open_for_write(path) as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)  # whatever the umask: only we may write
            file.write(hashlib.sha256(data).digest() + data)


@lru_cache(maxsize=1)
def _stamp() -> tuple[tuple[str, str], ...]:
    """What a compiled function is good for: the names of files and digests of what is in them.

    numba compiles a function again where its own file has changed. What is called from another file, and the numbers of
    codes, are compiled into it too: the cache must see a change in any of these files. Their times say nothing: those
    of a new installation of the same version are others.
    """
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(codes.__file__)]
    return tuple((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
