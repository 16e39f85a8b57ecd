"""What one plugin does to the settings of the process does not reach the others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from attncore.quoted import describe_error, type_name

_ABSENT = "attncore_asks_for_no_such_module"
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def process_left_as_found(plugin: str) -> Iterator[None]:
    """Within it ``plugin`` is loaded; afterwards the settings of the process are as before.

    These are ``sys.path``, the current folder, the recursion limit, the filters of ``warnings``, the ``ATTNCORE_``
    variables, the functions of ``sys.settrace`` and ``sys.setprofile``, and in the main thread the handlers of signals
    and timers that were not running. Finders that the plugin adds to ``sys.meta_path`` stay, for a library that it
    imports may need its own, but behind those of before, and only where they work. A child process that it forked ends
    here.
    """
    process, path, paths, finders = os.getpid(), sys.path, list(sys.path), sys.meta_path
    found, limit, environ, variables = list(finders), sys.getrecursionlimit(), os.environ, _variables(os.environ)
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = None
    traced, profiled = sys.gettrace(), sys.getprofile()
    with warnings.catch_warnings(), _signals():
        try:
            yield
        finally:
            sys.settrace(traced)
            sys.setprofile(profiled)
            sys.setrecursionlimit(limit)  # what follows calls functions
            if os.getpid() != process:
                os._exit(1)  # two of us would print
            added = sys.meta_path[:] if isinstance(getattr(sys, "meta_path", None), list) else []
            path[:], finders[:] = paths, found
            os.environ, sys.path, sys.meta_path = environ, path, finders
            _restore(environ, variables)
            if folder is not None:
                with contextlib.suppress(OSError):
                    os.chdir(folder)
            finders += _working(added, found, plugin)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Within it handlers may be set and timers started; afterwards they are as before."""
    if threading.current_thread() is not threading.main_thread():  # another may not set a handler
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    idle = [timer for timer in _TIMERS if signal.getitimer(timer) == (0.0, 0.0)]
    try:
        yield
    finally:
        for timer in idle:
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:  # None: not set by Python
                signal.signal(number, handler)


def _variables(environ: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("ATTNCORE_")}


def _restore(environ: os._Environ[str], variables: dict[str, str]) -> None:
    for name in _variables(environ).keys() - variables.keys():
        del environ[name]
    environ.update(variables)


def _working(finders: list[Any], known: list[Any], plugin: str) -> list[Any]:
    """Those of ``finders`` that are not ``known`` and answer for a module and a distribution that do not exist.

    One that raises, such as one of an old signature, would fail every import of what is not installed.
    """
    working: list[Any] = []
    for finder in finders:
        if any(finder is one for one in (*known, *working)):
            continue
        try:
            finder.find_spec(_ABSENT, None, None)
            if find := getattr(finder, "find_distributions", None):
                list(find(importlib.metadata.DistributionFinder.Context(name=_ABSENT)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = "%s adds %s to sys.meta_path, which is taken out again, because it fails: %s"
            with contextlib.suppress(Exception):  # of a handler that a plugin has added
                logger.warning(words, plugin, type_name(finder), describe_error(error))
        else:
            working.append(finder)
    return working
