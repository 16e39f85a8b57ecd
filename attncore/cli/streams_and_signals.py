"""How a command ends that is not let finish: a reader that has gone, a full disk, a signal.

A command's streams may be closed, full, or a pipe without a reader, and their encoding may lack a letter. Nothing of it
is a traceback: ``prepared`` is around a command, ``settle`` after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

READER_GONE = 128 + 13
"""The exit code where standard output is a pipe that is read no more: as if by SIGPIPE, like other tools."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. An exception, so that what a command leaves half-written is removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Around a command: streams that were closed are null devices, and signals that end it raise Terminated."""
    for name in ("stdin", "stdout", "stderr"):  # closed by the parent process: read nothing, write nothing
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin" and getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")  # a file's name may have what the encoding lacks
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {one: signal.signal(one, _raise) for one in numbers if signal.getsignal(one) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def settle() -> OSError | None:
    """Writes what is buffered for standard output and error; where that fails, drops it and returns standard output's
    error. The interpreter would try again at its end, and fail with a text of its own."""
    found = None
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except OSError as error:
            found = error
            with contextlib.suppress(OSError, ValueError):  # no file behind it
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, getattr(stream, "own", stream).fileno())
                os.close(null)
            with contextlib.suppress(OSError):
                stream.flush()
        except (ValueError, AttributeError):  # a plugin has closed it, or put something else in its place
            found = OSError(errno.EBADF, os.strerror(errno.EBADF))
        else:
            found = None
    return found
