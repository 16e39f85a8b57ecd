"""How the process ends is said by the command that it runs, and by no code of others in it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from attncore.logged import logged
from attncore.quoted import describe_error, quoted
from attncore.terminal import print_lines

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
"""Of ``<sys/prctl.h>``."""


def keep_exit_code() -> None:
    """From now on, until this process ends, code of others in it does not end it with 0, and silently.

    ``os._exit`` is a SystemExit, and what is registered with ``atexit`` is called ``AtItsEnd``. A thread that ends the
    process with 0 ends it with 1 and a line on standard error, whatever the command has found by then.
    """
    real, register = os._exit, atexit.register

    def in_a_thread(status: int) -> None:
        if status == 0:
            try:
                with contextlib.suppress(Exception):  # standard error is full, closed, or somebody else's
                    print_lines("attncore: error: a thread ends the process with os._exit(0)", sys.stderr)
                    sys.stderr.flush()
            finally:
                real(1)

    def registered(function: Any, *args: object, **kwargs: object) -> Any:
        return register_at_its_end(register, function, "a library", *args, **kwargs)

    os._exit = exit_refused(in_a_thread)
    atexit.register = registered  # type: ignore[assignment]
    atexit.unregister(logging.shutdown)  # which was registered before: a handler of others may raise in it
    register(AtItsEnd(_end_logging, "a library"))


def _end_logging() -> None:
    """Flushes every handler, also those after one that raises."""
    logging.raiseExceptions = False
    logging.shutdown()


def end_with_parent() -> None:
    """From now on, the system kills this process when the one that started it has ended, however. On Linux alone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_as_child(main: Callable[..., None]) -> NoReturn:
    """Run ``main`` of this process's arguments: the whole of a process whose answer is in a file when ``main`` returns.

    The interpreter would wait for the threads of a plugin's that are no daemons, for ever maybe. What is registered
    with ``atexit`` is called, for libraries clean up there.
    """
    end_with_parent()
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    except BaseException:
        sys.__excepthook__(*sys.exc_info())  # whose last line is how the process failed
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stderr.flush()
        finally:
            os._exit(code)


def end_if_forked(process: int) -> None:
    """Ends a child of ``process`` that code of others has forked, before two of us print, write or remove files."""
    if os.getpid() != process:
        os._exit(1)


def register_at_its_end(
    register: Callable[..., Any], function: Any, whose: str, *args: object, **kwargs: object
) -> Any:
    """As ``register``, which is ``atexit.register``; the function is called AtItsEnd."""
    if not callable(function):
        return register(function)
    register(AtItsEnd(function, whose), *args, **kwargs)
    return function


class AtItsEnd:
    """A function that code of others has registered: how it fails does not change how the process ends."""

    def __init__(self, function: Callable[..., object], whose: str) -> None:
        self._function, self._whose = function, whose

    def __call__(self, *args: object, **kwargs: object) -> None:
        real, os._exit = os._exit, exit_refused()
        try:
            self._function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = "a function that %s has registered with atexit failed: %s"
            logged(logger, logging.DEBUG, words, self._whose, describe_error(error))
        finally:
            os._exit = real

    def __eq__(self, other: object) -> bool:
        """``atexit.unregister`` is given the function itself."""
        return bool(self._function == other)

    __hash__ = None  # type: ignore[assignment]


def exit_refused(in_a_thread: Callable[[int], None] = lambda status: None) -> Any:
    """``os._exit`` that is a SystemExit in this process and thread, where it would end the caller silently.

    It is the one of before in a child that this process has forked, and in another thread, after ``in_a_thread``.
    """
    real, process, thread = os._exit, os.getpid(), threading.get_ident()

    def _exit(status: int) -> NoReturn:
        if os.getpid() == process:
            if threading.get_ident() == thread:
                raise SystemExit(f"os._exit({quoted(status)}) would end the process")
            in_a_thread(status)
        real(status)

    return _exit
