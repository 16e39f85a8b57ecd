"""The settings of the interpreter that can be asked for, as a table: what asks for one, and what sets it."""

from __future__ import annotations

import contextlib
import gc
import locale
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any


def _limit_of_sockets() -> Any:
    """The default time limit of sockets, whose module may not be imported."""
    socket = sys.modules.get("socket")
    return None if socket is None else socket.getdefaulttimeout()


def _limit_sockets(seconds: Any) -> None:
    if (socket := sys.modules.get("socket")) is not None:
        socket.setdefaulttimeout(seconds)


def _temporary_folder() -> Any:
    """Where temporary files lie, of tempfile, which may not be imported; None where it was not asked for yet."""
    tempfile: Any = sys.modules.get("tempfile")
    return None if tempfile is None else tempfile.tempdir


def _put_temporary_folder(found: Any) -> None:
    tempfile: Any = sys.modules["tempfile"]
    tempfile.tempdir = found


def _start_method() -> Any:
    """How multiprocessing starts processes; None where it was not set."""
    processes = sys.modules.get("multiprocessing")
    return None if processes is None else processes.get_start_method(allow_none=True)


def _put_start_method(found: Any) -> None:
    sys.modules["multiprocessing"].set_start_method(found, force=True)


def _loggers() -> tuple[Any, ...]:
    """Those that are not disabled, as ``logging.config`` does with every one that its configuration does not name."""
    known = list(logging.root.manager.loggerDict.values())
    return tuple(one for one in known if isinstance(one, logging.Logger) and not one.disabled)


def _enable_loggers(found: tuple[Any, ...]) -> None:
    for one in found:
        one.disabled = False


def _put_root_handlers(found: tuple[Any, ...]) -> None:
    logging.root.handlers[:] = found


def _tools() -> tuple[Any, ...]:
    """The tools of ``sys.monitoring``, which is there from Python 3.12 on."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return () if monitoring is None else tuple(map(monitoring.get_tool, range(6)))


def _take_out_tools(found: tuple[Any, ...]) -> None:
    """Those that are not ``found``; what they watch in single functions ends with their callbacks."""
    monitoring: Any = getattr(sys, "monitoring", None)
    for number, before in enumerate(found):
        if before is None and monitoring.get_tool(number) is not None:
            monitoring.set_events(number, 0)
            for event in (value for value in vars(monitoring.events).values() if isinstance(value, int) and value):
                with contextlib.suppress(ValueError):  # several events together
                    monitoring.register_callback(number, event, None)
            monitoring.free_tool_id(number)


_ASKED: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    # Threads that run have a tracer of settrace_all_threads, and get that of before, which new ones get.
    (threading.gettrace, getattr(threading, "settrace_all_threads", threading.settrace)),
    (threading.getprofile, getattr(threading, "setprofile_all_threads", threading.setprofile)),
    (_tools, _take_out_tools),
    (threading.stack_size, threading.stack_size),
    (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    (sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)),
    (sys.get_coroutine_origin_tracking_depth, sys.set_coroutine_origin_tracking_depth),
    (sys.getdlopenflags, sys.setdlopenflags),
    (lambda: locale.setlocale(locale.LC_ALL), lambda found: locale.setlocale(locale.LC_ALL, found)),
    (_limit_of_sockets, _limit_sockets),
    (_temporary_folder, _put_temporary_folder),
    (_start_method, _put_start_method),
    (gc.get_threshold, lambda found: gc.set_threshold(*found)),
    (gc.get_debug, gc.set_debug),
    (gc.isenabled, lambda found: gc.enable() if found else gc.disable()),
    (lambda: logging.root.manager.disable, logging.disable),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: tuple(logging.root.handlers), _put_root_handlers),
    (_loggers, _enable_loggers),
    (logging.getLoggerClass, logging.setLoggerClass),
    (logging.getLogRecordFactory, logging.setLogRecordFactory),
)
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (sys, "excepthook"), (sys, "displayhook"), (sys, "breakpointhook"), (threading, "excepthook"), (sys, "stdin"),
    (sys, "tracebacklimit"), (sys, "dont_write_bytecode"), (sys, "pycache_prefix"), (logging, "raiseExceptions"),
    (sys, "executable"),
)  # fmt: skip
_NONE: Any = object()
"""In the place of an attribute that is not there, and of what cannot be asked for."""


class InterpreterSettings:
    """``restore`` has the settings of both tables as they were found; it may be interrupted, and called again."""

    def __init__(self) -> None:
        self._found = [_asked(ask) for ask, _ in _ASKED]
        self._attributes = [getattr(place, name, _NONE) for place, name in _ATTRIBUTES]

    def restore(self) -> None:
        """As they were found; one that cannot be set again stays, and those after it are restored."""
        for (place, name), found in zip(_ATTRIBUTES, self._attributes, strict=True):
            if found is not _NONE:
                setattr(place, name, found)
            elif hasattr(place, name):
                delattr(place, name)
        for (ask, set_again), found in zip(_ASKED, self._found, strict=True):
            with contextlib.suppress(Exception):
                if found is not _NONE and _differ(ask(), found):
                    set_again(found)


def _asked(ask: Callable[[], Any]) -> Any:
    """A setting; _NONE where a plugin has put something else in the place of the module or function that says it."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return _NONE


def _differ(now: Any, found: Any) -> bool:
    """Whether they differ. No method of an object of the plugin's, such as a tracer, is called."""
    if isinstance(found, tuple):
        return len(now) != len(found) or any(map(_differ, now, found))
    return now is not found and (type(now) is not type(found) or type(found) not in (int, float, str) or now != found)
