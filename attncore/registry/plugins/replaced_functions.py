"""Functions of Python that are ours while code of a plugin runs: what they start cannot be asked for afterwards."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from attncore.process_end import exit_refused, register_at_its_end

_PLACES: tuple[tuple[Any, str], ...] = (
    (os, "_exit"), (atexit, "register"), (faulthandler, "dump_traceback_later"), (faulthandler, "register"),
)  # fmt: skip
_SETTERS: tuple[tuple[Any, str, dict[str, Any]], ...] = (
    (os, "umask", {}), (signal, "set_wakeup_fd", {"warn_on_full_buffer": False}),
)  # fmt: skip
"""Functions that return what they replace, which nothing else says; and by which arguments that is set again."""
_STDERR = 2


class ReplacedFunctions:
    """Between ``begin`` and ``restore`` the functions of _PLACES and _SETTERS are ours.

    ``os._exit`` is a SystemExit. What is registered with ``atexit`` is called in ``AtItsEnd``: libraries that the
    plugin imports clean up there. What ``faulthandler`` is told is taken back: its timer, and the signals that it
    answers. It has one timer, and one answer to a signal; one of the program's that the plugin has replaced is lost.
    What the first call of one of _SETTERS has replaced is set again.
    Both may be interrupted at any place: ``restore`` is then called again.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._found = [getattr(module, name) for module, name in _PLACES]
        self._enabled = faulthandler.is_enabled()
        self._timer, self._signals = False, set[int]()
        self._setters = [getattr(module, name) for module, name, _ in _SETTERS]
        self._replaced: list[list[int]] = [[] for _ in _SETTERS]

    def begin(self) -> None:
        """Before code of the plugin runs."""
        for (module, name), ours in zip(
            _PLACES, (exit_refused(), self._at_exit, self._later, self._answer), strict=True
        ):
            setattr(module, name, ours)
        for (module, name, _), real, replaced in zip(_SETTERS, self._setters, self._replaced, strict=True):
            setattr(module, name, _noted(real, replaced))

    def restore(self) -> None:
        """As they were found."""
        for (module, name), found in zip(_PLACES, self._found, strict=True):
            setattr(module, name, found)
        for (module, name, options), real, replaced in zip(_SETTERS, self._setters, self._replaced, strict=True):
            setattr(module, name, real)
            with contextlib.suppress(OSError, ValueError):  # the descriptor has been closed since
                for value in replaced[:1]:
                    real(value, **options)
            replaced.clear()
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
        return register_at_its_end(self._found[1], function, self._plugin, *args, **kwargs)

    def _later(self, *args: Any, **kwargs: Any) -> None:
        """As ``faulthandler.dump_traceback_later``."""
        self._timer = True
        self._found[2](*args, **kwargs)

    def _answer(self, signum: int, *args: Any, **kwargs: Any) -> None:
        """As ``faulthandler.register``."""
        self._signals.add(int(signum))
        self._found[3](signum, *args, **kwargs)


def _noted(real: Callable[..., int], replaced: list[int]) -> Callable[..., int]:
    """As ``real``, a function that returns what it replaces; that is noted."""

    def noted(*args: Any, **kwargs: Any) -> int:
        replaced.extend(map(partial(real, **kwargs), *((one,) for one in args)))  # one call of C: nothing comes between
        return replaced[-1]

    return noted
