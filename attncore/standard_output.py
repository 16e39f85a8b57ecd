"""Standard output that holds what a command prints, and nothing of the libraries that it loads."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def own_standard_output(*, to_the_end: bool) -> Iterator[None]:
    """``sys.stdout`` writes to standard output; what else is written to file descriptor 1 goes to standard error.

    So native code, child processes and a C library's buffers do not mix with what the command prints. With
    ``to_the_end`` it stays so afterwards, for what is written while Python ends. Nothing changes where ``sys.stdout``
    is not file descriptor 1, such as in a test.
    """
    before = sys.stdout
    if not isinstance(before, io.TextIOWrapper) or not _is_descriptor_1(before):
        yield
        return
    before.flush()
    own = io.TextIOWrapper(
        open(fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), "wb"),  # noqa: SIM115  closed below; 0 to 2 may be closed
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    _redirect(1, 2)
    sys.stdout = own
    try:
        yield
    finally:
        try:
            own.flush()
        except (OSError, ValueError):  # its reader has gone, or the disk is full: main has said so
            _redirect(own.fileno(), None)
        sys.stdout = before
        if not to_the_end:
            _redirect(1, own.fileno())
        own.close()


def _is_descriptor_1(stream: io.TextIOWrapper) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):
        return False


def _redirect(descriptor: int, target: int | None) -> None:
    """Make ``descriptor`` a copy of ``target``; it writes nowhere where that is None or closed."""
    with contextlib.suppress(OSError):
        if target is not None:
            os.dup2(target, descriptor)
            return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
