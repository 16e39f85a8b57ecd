"""Ctrl-C outside of what a command does: while it is loaded, and while Python ends. Imports nothing but signal."""

from __future__ import annotations

import signal
from collections.abc import Callable


def as_program(load: Callable[[], Callable[[], int]]) -> int:
    """The exit code of the command that ``load`` imports: the whole of a process.

    Before it and after it there is nothing to be put in order, so that an interrupt ends the process at once and
    silently, as one of any other tool, in place of a traceback of the module that is being imported. Where the process
    was started with interrupts ignored, they stay so.
    """
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
