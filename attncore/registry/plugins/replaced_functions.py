"""Functions of Python that are ours while code of a plugin runs: what they start cannot be asked for afterwards."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from attncore.logged import logged
from attncore.quoted import describe_error, quoted

_PLACES: tuple[tuple[Any, str], ...] = (
    (os, "_exit"), (atexit, "register"), (faulthandler, "dump_traceback_later"), (faulthandler, "register"),
)  # fmt: skip
_STDERR = 2
logger = logging.getLogger(__name__)


class ReplacedFunctions:
    """Between ``begin`` and ``restore`` the functions of _PLACES are ours.

    ``os._exit`` is a SystemExit. What is registered with ``atexit`` is called in ``_AtItsEnd``: libraries that the
    plugin imports clean up there. What ``faulthandler`` is told is taken back: its timer, and the signals that it
    answers. It has one timer, and one answer to a signal; one of the program's that the plugin has replaced is lost.
    Both may be interrupted at any place: ``restore`` is then called again.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._found = [getattr(module, name) for module, name in _PLACES]
        self._enabled = faulthandler.is_enabled()
        self._timer, self._signals = False, set[int]()

    def begin(self) -> None:
        """Before code of the plugin runs."""
        for (module, name), ours in zip(
            _PLACES, (exit_refused(), self._at_exit, self._later, self._answer), strict=True
        ):
            setattr(module, name, ours)

    def restore(self) -> None:
        """As they were found."""
        for (module, name), found in zip(_PLACES, self._found, strict=True):
            setattr(module, name, found)
        if self._timer:
            faulthandler.cancel_dump_traceback_later()
            self._timer = False
        for number in self._signals:
            with contextlib.suppress(ValueError, OverflowError):  # no signal's number
                faulthandler.unregister(number)
        self._signals.clear()
        if self._enabled and not faulthandler.is_enabled():
            faulthandler.enable(_STDERR)  # where to it wrote is not known
        elif not self._enabled:
            faulthandler.disable()

    def _at_exit(self, function: Any, *args: object, **kwargs: object) -> Any:
        """As ``atexit.register``."""
        _, register, _, _ = self._found
        if not callable(function):
            return register(function)
        register(_AtItsEnd(function, self._plugin), *args, **kwargs)
        return function

    def _later(self, *args: Any, **kwargs: Any) -> None:
        """As ``faulthandler.dump_traceback_later``."""
        self._timer = True
        self._found[2](*args, **kwargs)

    def _answer(self, signum: int, *args: Any, **kwargs: Any) -> None:
        """As ``faulthandler.register``."""
        self._signals.add(int(signum))
        self._found[3](signum, *args, **kwargs)


class _AtItsEnd:
    """A function that code of a plugin has registered: how it fails does not change how the process ends."""

    def __init__(self, function: Callable[..., object], plugin: str) -> None:
        self._function, self._plugin = function, plugin

    def __call__(self, *args: object, **kwargs: object) -> None:
        real, os._exit = os._exit, exit_refused()
        try:
            self._function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = "a function that %s has registered with atexit failed: %s"
            logged(logger, logging.DEBUG, words, self._plugin, describe_error(error))
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
