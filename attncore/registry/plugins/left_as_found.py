"""What one plugin does to the settings of the process does not reach the others."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.metadata
import itertools
import logging
import operator
import os
import resource
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

from attncore.logged import logged
from attncore.quoted import describe_error, type_name
from attncore.registry.plugins.half_imported import half_imported
from attncore.registry.plugins.interpreter_settings import InterpreterSettings
from attncore.registry.plugins.replaced_functions import ReplacedFunctions
from attncore.registry.plugins.torch_settings import TorchSettings

_NEEDED = sys.stdlib_module_names | {"attncore", "numpy", "packaging", "platformdirs", "pluggy", "rich"}
_NEEDED |= {"numba", "torch", "transformers"}
_ABSENT = "attncore_asks_for_no_such_module"
_SIGNALS = tuple(int(number) for number in signal.valid_signals())  # asked once: it makes an enum of each
_FINDERS = (importlib.machinery.FileFinder, type(None))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_TRIES = 100
"""A handler of a timer may raise some times before the timer is stopped."""
logger = logging.getLogger(__name__)


class Process:
    """The settings of the process, which ``restore`` has as they were found, after code of ``plugin`` has run.

    These are ``sys.path``, ``sys.path_hooks`` and ``sys.path_importer_cache``, what ``_Modules`` says, the current
    folder, the recursion limit, the limits of ``resource``, how often threads take turns, the filters of ``warnings``,
    the variables ``ATTNCORE_...`` and ``PYTHON...``, the names of the package attncore, the functions of
    ``sys.settrace``, ``sys.setprofile`` and ``sys.unraisablehook``, what InterpreterSettings, TorchSettings and
    ReplacedFunctions say, the callbacks of ``gc``,
    and in the main thread the handlers of signals, those that are blocked, and timers that were not running. Finders
    that the plugin adds to ``sys.meta_path`` stay, for a library that it imports may need its own, but behind those of
    before, and only where they work. A child process that it forked ends here. All of it may be interrupted at any
    place: ``restore`` is then called again.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin, self._pid, self._exit = plugin, os.getpid(), os._exit
        self._functions, self._modules = ReplacedFunctions(plugin), _Modules()
        self._turns, self._limits = sys.getswitchinterval(), {one: resource.getrlimit(one) for one in _LIMITS}
        self._signals, self._search, self._filters = Signals(), _SearchSettings(), _WarningFilters()
        self._names, self._collector, self._settings = _Names(), _Collector(), InterpreterSettings()
        self._torch = TorchSettings(plugin)
        self._finders, self._known = sys.meta_path, list(sys.meta_path)
        self._added: list[Any] = []
        self._limit, self._environ, self._variables = sys.getrecursionlimit(), os.environ, _variables(os.environ)
        self._traced, self._profiled, self._unraisable = sys.gettrace(), sys.getprofile(), sys.unraisablehook
        self._lost: list[KeyboardInterrupt] = []
        try:
            self._folder: str | None = os.getcwd()
        except OSError:  # it was deleted
            self._folder = None

    def begin(self) -> None:
        """Before code of the plugin runs."""
        sys.unraisablehook = self._swallowed
        self._functions.begin()

    def idle_timers(self) -> tuple[int, ...]:
        """The timers of this thread's that were not running."""
        return self._signals.idle

    def restore(self) -> None:
        """As they were found; an interrupt is raised, also one that an object of the plugin's has swallowed."""
        if os.getpid() != self._pid:
            self._exit(1)  # two of us would print
        if sys.getswitchinterval() != self._turns:  # before another thread takes a long one
            sys.setswitchinterval(self._turns)
        sys.setrecursionlimit(self._limit)  # what follows calls functions
        self._set_finders_aside()  # and may import
        self._collector.restore()
        self._signals.restore()  # so that no handler of the plugin's interrupts it
        self._untrace()
        self._settings.restore()
        self._untrace()  # that of all threads is this one's, too
        self._modules.restore()
        self._names.restore()
        self._torch.restore()
        _restore_limits(self._limits)
        self._search.restore()
        working = _working(self._added, self._known, self._plugin)
        if os.getpid() != self._pid:  # a finder that forks
            self._exit(1)
        self._signals.restore()
        self._filters.restore()
        self._search.restore()
        self._finders[:] = [*self._known, *working]
        os.environ, sys.meta_path = self._environ, self._finders
        self._added.clear()  # a restore that was interrupted has them still
        sys.unraisablehook = self._unraisable
        self._functions.restore()
        _restore(self._environ, self._variables)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)
        if self._lost:
            lost, self._lost = self._lost[-1], []
            raise lost

    def _set_finders_aside(self) -> None:
        """Keeps those that the plugin has added, of which one may raise at every import."""
        if isinstance(getattr(sys, "meta_path", None), list):
            self._added += sys.meta_path
        self._finders[:] = self._known
        sys.meta_path = self._finders

    def _untrace(self) -> None:
        if sys.gettrace() is not self._traced:
            sys.settrace(self._traced)
        if sys.getprofile() is not self._profiled:
            profiled: Any = self._profiled
            if profiled is None or callable(profiled):
                sys.setprofile(profiled)
            else:  # cProfile's is no function
                profiled.enable()

    def _swallowed(self, told: sys.UnraisableHookArgs) -> None:
        """An error of a plugin's object that goes away, such as a generator that does not end when it is closed.

        An interrupt is the user's: the hook of before is told, which may raise it again, and ``restore`` raises it.
        """
        if isinstance(told.exc_value, KeyboardInterrupt):
            self._lost.append(told.exc_value.with_traceback(None))
            self._unraisable(told)
        else:
            logged(logger, logging.DEBUG, "%s: %s", type_name(told.object), type_name(told.exc_value))


class _Collector:
    """The functions that ``gc`` calls."""

    def __init__(self) -> None:
        self._functions, self._found = gc.callbacks, list(gc.callbacks)

    def restore(self) -> None:
        """As they were found."""
        self._functions[:] = self._found
        gc.callbacks = self._functions


class _Modules:
    """``sys.modules``: what others need of it stays, and attncore's own modules stay the same objects.

    Whoever drops those, to import them anew, has classes that are not ours. Of the other modules that were imported,
    one that is dropped, or None, which blocks its import, is put back; one that another stands for stays replaced. One
    that another thread was importing may be gone because that failed, and is not.
    """

    def __init__(self) -> None:
        self.table: dict[str, Any] = sys.modules
        self._found = self.table.copy()
        self._half = half_imported(self._found) if threading.active_count() > 1 else set()

    def restore(self) -> None:
        """As they were found; those that were imported since stay, unless one of attncore's of before was lost."""
        sys.modules = self.table
        try:
            if self.table == self._found:  # one call of C, where the loops below look at some thousands of names
                return
        except Exception:  # of an object of the plugin's that is no module
            pass
        for name, module in self.table.copy().items():
            if module is None and name not in self._found and _is_needed(name):
                self.table.pop(name, None)
        self._restore_dropped()
        self._restore_own()

    def _restore_dropped(self) -> None:
        """A package before its parts, of which none is put below a package that was imported anew."""
        dropped = [name for name in self._found if self.table.get(name) is None and not _is_ours(name)]
        for name in sorted(name for name in dropped if type(name) is str and name not in self._half):
            package, found = name.partition(".")[0], self._found[name]
            if name == package or self.table.get(package) is self._found.get(package):
                self.table[name] = found

    def _restore_own(self) -> None:
        ours = {name: module for name, module in self._found.items() if _is_ours(name)}
        lost = {name: module for name, module in ours.items() if self.table.get(name) is not module}
        if not lost:
            return
        for name in [name for name in self.table.copy() if _is_ours(name) and name not in ours]:
            self.table.pop(name, None)  # it was imported with the others
        for name, module in lost.items():
            package, _, last = name.rpartition(".")
            if isinstance(getattr(ours.get(package), last, None), ModuleType):
                setattr(ours[package], last, module)
        self.table.update(lost)  # last: until then a restore that is interrupted begins again


class _Names:
    """The names of the package attncore, which every plugin imports from it, and which one may set or delete."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = sys.modules["attncore"].__dict__
        self._found = self._names.copy()

    def restore(self) -> None:
        """As they were found; of those that came since, a public one that attncore has otherwise is asked for anew."""
        homes: dict[str, str] = self._found["_HOME"]
        now = self._names.copy()  # which a thread that asks for a name for the first time adds to
        for name in [name for name in now if name not in self._found and type(name) is str and name in homes]:
            if getattr(sys.modules.get(homes[name]), name, self) is not now[name]:
                self._names.pop(name, None)
        for name, value in self._found.items():
            if self._names.get(name, self) is not value:
                self._names[name] = value


def _is_ours(name: object) -> bool:
    return type(name) is str and (name == "attncore" or name.startswith("attncore."))


def _is_needed(name: object) -> bool:
    """Whether attncore, or Python itself, may import it later."""
    return type(name) is str and name.partition(".")[0] in _NEEDED


def _restore_limits(limits: dict[int, tuple[int, int]]) -> None:
    """The limits of ``resource``; where the plugin has lowered one for good, as near to what was found as may be."""
    for number, found in limits.items():
        now = resource.getrlimit(number)
        for soft, hard in (found, (found[0], now[1]), (now[1], now[1])) if now != found else ():
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, hard))
                break


class _WarningFilters:
    """The filters of ``warnings`` and what shows one; ``catch_warnings`` would have each be shown again.

    Where other threads of Python run, another list in their place stays: one of them may be within ``catch_warnings``,
    as torch is while it is imported, or have been in it before.
    """

    def __init__(self) -> None:
        self.filters, self.show, self._alone = warnings.filters, warnings.showwarning, threading.active_count() == 1
        self._filters = list(warnings.filters)

    def restore(self) -> None:
        """As they were found."""
        warnings.showwarning = self.show
        now: Any = warnings.filters
        if now is not self.filters and (self._alone or not isinstance(now, list)):
            warnings.filters = self.filters
        elif len(self.filters) == len(self._filters) and all(map(operator.is_, self.filters, self._filters)):
            return
        self.filters[:] = self._filters  # type: ignore[index]
        if (tell := getattr(warnings, "_filters_mutated", None)) is not None:
            tell()
            return
        with warnings.catch_warnings():  # which tells it, too, and puts another list in place for a moment
            pass


class _SearchSettings:
    """What ``sys`` has to find modules in folders, the objects and what they hold."""

    def __init__(self) -> None:
        self.path, self.hooks, self.cache = sys.path, sys.path_hooks, sys.path_importer_cache
        self._path, self._hooks, self._cache = list(self.path), list(self.hooks), dict(self.cache)

    def restore(self) -> None:
        """As they were found, but for Python's own finders of folders that were searched since."""
        self.path[:], self.hooks[:] = self._path, self._hooks
        now = self.cache.copy()  # which a thread that imports adds to
        python = {key: one for key, one in now.items() if type(key) is str and type(one) in _FINDERS}
        self.cache.clear()
        self.cache.update({**python, **self._cache})
        sys.path, sys.path_hooks, sys.path_importer_cache = self.path, self.hooks, self.cache


class Signals:
    """Handlers of signals, those that are blocked, and timers: of the main thread, for another may set no handler."""

    def __init__(self, numbers: Iterable[int] = _SIGNALS) -> None:
        self.handlers: dict[int, Any] = {}
        self.idle: tuple[int, ...] = ()
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.getsignal(number) for number in numbers}
            self.idle = tuple(timer for timer in _TIMERS if signal.getitimer(timer) == (0.0, 0.0))
            self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore(self) -> None:
        """As they were found. Begun again where a handler of the plugin's raises meanwhile; an interrupt is raised."""
        interrupt = None
        for _ in range(_TRIES if self.handlers else 0):
            try:
                self._restore()
                break
            except KeyboardInterrupt as error:
                interrupt = error
            except BaseException:  # of the plugin, whose handlers may log, too
                continue
        if interrupt is not None:
            raise interrupt

    def _restore(self) -> None:
        for timer in self.idle:
            signal.setitimer(timer, 0)
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) != handler:  # None: not set by Python
                signal.signal(number, signal.SIG_IGN)  # drops one that has arrived, which the default may end us by
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


class Wakeup:
    """The descriptor to which Python writes each signal, by ``set_wakeup_fd``: of the main thread, as its handlers.

    One that a backend sets, and closes, would make a traceback of each signal. A plugin's light module, which runs
    where ReplacedFunctions notes what it sets, needs no such object.
    """

    _set = staticmethod(partial(signal.set_wakeup_fd, warn_on_full_buffer=False))

    def __init__(self) -> None:
        self._found: int | None = None
        if threading.current_thread() is threading.main_thread():
            # Only what sets another one tells; it is set again in the same call of C, where no interrupt comes between.
            asked, kept = itertools.tee(map(self._set, (-1,)))
            with contextlib.suppress(OSError, ValueError):  # it is closed
                deque(map(self._set, asked), 0)
            self._found = next(kept)

    def restore(self) -> None:
        """As it was found; of no effect in another thread, or where that one has been closed."""
        if self._found is not None and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError, ValueError):
                self._set(self._found)


def _variables(environ: os._Environ[str]) -> dict[str, str]:
    names = [name for name in environ if name.startswith(("ATTNCORE_", "PYTHON"))]
    found = {name: environ.get(name) for name in names}  # of which another thread may delete one
    return {name: value for name, value in found.items() if value is not None}


def _restore(environ: os._Environ[str], variables: dict[str, str]) -> None:
    for name in _variables(environ).keys() - variables.keys():
        with contextlib.suppress(KeyError):
            del environ[name]
    environ.update(variables)


def _working(finders: list[Any], known: list[Any], plugin: str) -> list[Any]:
    """Those of ``finders`` that are not ``known`` and do not find a module and a distribution that do not exist.

    One that raises, such as one of an old signature, would fail every import of what is not installed; one that finds
    it would give every other plugin modules of its own.
    """
    working: list[Any] = []
    for finder in finders:
        if any(finder is one for one in (*known, *working)):
            continue
        try:
            if finder.find_spec(_ABSENT, None, None) is not None:
                raise ImportError("it finds a module that does not exist")
            find = getattr(finder, "find_distributions", None)
            if find and list(find(importlib.metadata.DistributionFinder.Context(name=_ABSENT))):
                raise ImportError("it finds a distribution that does not exist")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = "%s adds %s to sys.meta_path, which is taken out again, because it fails: %s"
            logged(logger, logging.WARNING, words, plugin, type_name(finder), describe_error(error))
        else:
            working.append(finder)
    return working
