"""Ctrl-C outside of what a command does: while it is loaded, and while Python ends. Imports what Python itself holds.

``signal`` is no such module: it makes enums, for some milliseconds in which an interrupt would be a traceback.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in attncore/__init__.py
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn
else:
    import _signal as signal

_SOON = 1e-3
"""Seconds after which an interrupt that was lost is raised again: what swallowed it has returned."""
_lost: list[BaseException] = []
"""The interrupts that were lost and are not raised again yet."""


def as_program(load: Callable[[], Callable[[], int]]) -> int:
    """The exit code of the command that ``load`` imports: the whole of a process.

    Before it and after it there is nothing to be put in order, so that an interrupt ends the process at once and
    silently, as one of any other tool, in place of a traceback of the module that is being imported. Where the process
    was started with interrupts ignored, they stay so.
    """
    _raise_again_what_is_swallowed()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return load()()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = load()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return command()
    except KeyboardInterrupt as error:  # between two parts of the command that say it themselves
        return int(getattr(error, "code", 130))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raises_again() -> bool:
    """Whether an interrupt that was lost is about to be raised again, by a timer that is not to be stopped."""
    return bool(_lost)


def _raise_again_what_is_swallowed() -> None:
    """Has an interrupt that arrives in a callback, such as importlib's on a lock that is freed, end the command too.

    Python prints what a callback raises and goes on. A signal that ends a command otherwise is lost in the same way.
    Until then SIGALRM keeps its default: one from outside ends the process, as it ends any other.
    """

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        lost = error.with_traceback(None)

        def again(number: int, frame: FrameType | None) -> NoReturn:
            signal.setitimer(signal.ITIMER_REAL, 0)  # set again by a second one meanwhile: it would end the process
            signal.signal(signal.SIGALRM, before)
            _lost.clear()
            raise lost

        before = signal.SIG_DFL if _lost else signal.getsignal(signal.SIGALRM)
        try:
            signal.signal(signal.SIGALRM, again)
        except ValueError:  # another thread's, which no signal has interrupted
            sys.__unraisablehook__(unraisable)
        else:
            _lost.append(lost)
            signal.setitimer(signal.ITIMER_REAL, _SOON)

    if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        sys.unraisablehook = swallowed
