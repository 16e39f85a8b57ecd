"""Standard output that holds what a command prints, and nothing of the libraries that it loads.

``own_streams`` is around a command, ``LentStreams`` around code of a plugin. ``named_descriptor`` and
``is_standard_output`` say what a path such as ``/dev/stdout`` means. Code of others gets Lent streams, which
it may close, detach or wrap without any effect on what is printed afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import select
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

_STREAMS = {"stdout": 1, "stderr": 2, "__stdout__": 1, "__stderr__": 2}
"""Names of streams in ``sys`` -> their file descriptors."""

_of_commands: list[dict[str, Any]] = []
"""The streams of the commands that run, by their names; the innermost command is the last."""


class Lent:
    """A stream of ours that others write to: what they write reaches it, and nothing else that they do.

    Closing it is of no effect, ``detach`` and ``buffer`` give a stream that is lent too, and ``fileno`` is never a
    descriptor of our own, which an ``open(sys.stdout.fileno(), "w")`` would close.
    """

    own: Any
    """The stream itself."""
    _descriptor: int | None

    def __init__(self, stream: Any, descriptor: int | None = None) -> None:
        self.own = stream.own if isinstance(stream, Lent) else stream
        self._descriptor = stream._descriptor if isinstance(stream, Lent) else descriptor

    def same(self, other: Lent) -> bool:
        """Whether ``other`` lends the same stream."""
        return self.own is other.own and self._descriptor == other._descriptor

    def __getattr__(self, name: str) -> Any:
        if name == "own" or name.startswith("_"):  # half made, or what the stream's class keeps for itself
            raise AttributeError(name)
        return getattr(self.own, name)

    def __iter__(self) -> Any:
        return iter(self.own)

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Flush the stream."""
        self.own.flush()

    def fileno(self) -> int:
        """The descriptor that others know the stream by."""
        return int(self.own.fileno()) if self._descriptor is None else self._descriptor

    def close(self) -> None:
        """Leave the stream open."""

    def reconfigure(self, **_: object) -> None:
        """Leave the stream as it is."""

    def detach(self) -> Lent:
        """As ``buffer``, or ``raw`` of a binary stream; this object stays of use."""
        return self.buffer if hasattr(self.own, "buffer") else self.raw

    @property
    def buffer(self) -> Lent:
        """The binary stream beneath it; AttributeError where there is none."""
        return Lent(self.own.buffer, self._descriptor)

    @property
    def raw(self) -> Lent:
        """The stream beneath a binary one; AttributeError where there is none."""
        return Lent(self.own.raw, self._descriptor)


_lent: deque[Lent] = deque(maxlen=64)
"""The streams that were lent last. Python's ``print`` does not hold the stream that it prints to, and would crash where
another thread puts a new one into ``sys`` and the old one is freed."""


def _lend(stream: Any, descriptor: int | None = None) -> Lent:
    lent = Lent(stream, descriptor)
    found = next((one for one in _lent if one.same(lent)), lent)
    if found is lent:
        _lent.append(lent)
    return found


def kept_stream(name: str) -> Any:
    """``sys.stdout`` or ``sys.stderr`` as the command that runs began with it, whatever others have put there since."""
    return _of_commands[-1][name] if _of_commands else getattr(sys, name)


def found_streams() -> dict[str, Any]:
    """The streams of ``sys`` by their names."""
    return {name: getattr(sys, name, None) for name in _STREAMS}


def put_streams(found: dict[str, Any]) -> None:
    """Have ``sys`` show the streams that ``found_streams`` has returned."""
    for name, stream in found.items():
        setattr(sys, name, stream)


class LentStreams:
    """``lend`` lends ``sys.stdout`` and ``sys.stderr``; ``restore`` has them and file descriptors 1 and 2 as found.

    A plugin may keep a stream that it finds here, as the handlers of ``logging`` do. Both may be interrupted at any
    place: ``restore`` is then called again.
    """

    def __init__(self) -> None:
        self._streams = found_streams()
        self._files = {descriptor: file for descriptor in (1, 2) if (file := _file(descriptor)) is not None}
        self._copies: dict[int, list[int]] = {descriptor: [] for descriptor in self._files}

    def lend(self) -> None:
        """Put lent streams in the place of those of ``sys``."""
        for descriptor, copies in self._copies.items():
            _add_copy(copies, descriptor)
        for name, stream in self._streams.items():
            setattr(sys, name, None if stream is None else _lend(stream))

    def restore(self) -> None:
        """As they were found."""
        put_streams(self._streams)
        for descriptor, copies in self._copies.items():
            if copies and _file(copies[0]) == self._files[descriptor]:
                _redirect(descriptor, copies[0])
                with contextlib.suppress(IndexError):  # one call of C: no interrupt between the two
                    any(map(os.close, iter(copies.pop, None)))
            elif _file(descriptor) is None:  # the plugin has closed every descriptor, or opened others in their place
                _redirect(descriptor, None)


@contextlib.contextmanager
def lent_streams() -> Iterator[None]:
    """Within it the streams are lent; afterwards they and their file descriptors are as before."""
    streams = LentStreams()
    try:
        streams.lend()
        yield
    finally:
        streams.restore()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects what plugins print while they load to standard error, so that the command's own output stays clean.

    Both streams are lent: they are as before afterwards, whatever a plugin does to them.
    """
    with lent_streams(), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def own_streams(*, to_the_end: bool) -> Iterator[None]:
    """``sys.stdout`` writes to standard output; what else is written to file descriptor 1 goes to standard error.

    So native code, child processes and a C library's buffers do not mix with what the command prints. Both streams have
    descriptors of their own, so that it does not matter what others do to 1 and 2. With ``to_the_end`` it stays so
    afterwards, for what is written while Python ends. Nothing changes where ``sys.stdout`` is not file descriptor 1,
    such as in a test.
    """
    before = found_streams()
    if not _writes_to(before["stdout"], 1):
        with _kept():
            yield
        return
    own = {n: _own(before[n]) for n in ("stdout", "stderr") if _writes_to(before[n], _STREAMS[n])}
    _redirect(1, 2)
    for name, stream in {**before, **own}.items():
        setattr(sys, name, _lend(stream, _STREAMS[name]))
    try:
        with _kept():
            yield
    finally:
        put_streams({name: _lend(stream) for name, stream in before.items()} if to_the_end else before)
        for name, stream in own.items():
            try:
                stream.flush()
            except (OSError, ValueError):  # its reader has gone, or the disk is full: main has said so
                _redirect(stream.fileno(), None)
            if not to_the_end:
                _redirect(_STREAMS[name], stream.fileno())
            with contextlib.suppress(OSError):  # a plugin has closed every descriptor
                stream.close()


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Within it ``kept_stream`` is the one of now."""
    _of_commands.append(found_streams())
    try:
        yield
    finally:
        _of_commands.pop()


def named_descriptor(path: str | os.PathLike[str]) -> int | None:
    """The file descriptor of this process that a path names, such as ``/dev/fd/3`` or ``/dev/stdout``; else None."""
    text = os.fspath(path)
    for _ in range(40):  # links, which may lead to themselves
        folder, name = os.path.split(text)
        try:
            if _is_of_descriptors(os.path.realpath(folder)) and name.isdecimal() and len(name) < 10:
                return int(name)
            text = os.path.join(folder, os.readlink(text))
        except OSError:  # no link, or the current folder has been deleted
            return None
    return None


def _is_of_descriptors(folder: str) -> bool:
    """Whether a folder, without links, is that of this process's descriptors, which its threads share."""
    thread = re.fullmatch(r"/proc/(?:[0-9]+/task/)?([0-9]+)/fd", folder)
    return folder == "/dev/fd" or (thread is not None and os.path.isdir(f"/proc/self/task/{thread[1]}"))


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether what is written to ``path`` mixes with standard output: they are one file, pipe or terminal."""
    descriptor = named_descriptor(path)
    if descriptor == 1:
        return True
    stream = sys.stdout.own if isinstance(sys.stdout, Lent) else sys.stdout
    try:  # by way of the stream: others may have changed where descriptor 1 leads to
        ours, other = os.fstat(stream.fileno()), os.stat(path if descriptor is None else descriptor)
        return os.path.samestat(ours, other) and not os.path.samestat(ours, os.stat(os.devnull))
    except (OSError, ValueError):  # no file behind the stream, or none of that name
        return False


def _writes_to(stream: object, descriptor: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _own(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream like ``stream``, to the same file by a descriptor of its own."""
    with contextlib.suppress(OSError):  # a full disk: what is printed next says so
        stream.flush()
    return io.TextIOWrapper(
        waiting_file(copied_descriptor(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        # Also of an unbuffered one (PYTHONUNBUFFERED), which has no buffer beneath it: this one has, which is filled
        # whatever ``write_through`` says, and would be written behind what the other stream has said since.
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _WaitingWriter(io.FileIO):
    """A file whose descriptor does not wait, such as a pipe that the parent's event loop shares, written to as one that
    does: else what its reader has not taken yet would be an error in the middle of an answer.
    """

    def write(self, data: Any, /) -> int:
        """Its bytes, or the first of them; their number."""
        while (count := super().write(data)) is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()
        return count


def waiting_file(descriptor: int) -> io.BufferedWriter:
    """A binary file that writes to a descriptor, closes it in the end, and waits whether or not the descriptor does."""
    if os.get_blocking(descriptor):
        return open(descriptor, "wb")
    return io.BufferedWriter(_WaitingWriter(descriptor, "wb"))


def copied_descriptor(descriptor: int) -> int:
    """A copy of a file descriptor; OSError where it is closed.

    It is out of reach of those who close the first thousand by their numbers, where the process may have so many.
    """
    copies: list[int] = []
    _add_copy(copies, descriptor)
    return copies[0]


def _add_copy(copies: list[int], descriptor: int) -> None:
    """Add what ``copied_descriptor`` returns, in one call of C: no interrupt comes between that and the list."""
    command = (fcntl.F_DUPFD_CLOEXEC,)
    try:
        copies.extend(map(fcntl.fcntl, (descriptor,), command, (1024,)))
    except OSError:
        copies.extend(map(fcntl.fcntl, (descriptor,), command, (3,)))


def _file(descriptor: int) -> tuple[int, int, int] | None:
    """Which file a descriptor is of; None where it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_rdev


def _redirect(descriptor: int, target: int | None) -> None:
    """Make ``descriptor`` a copy of ``target``; it writes nowhere where that is None or closed."""
    with contextlib.suppress(OSError):
        if target is not None:
            os.dup2(target, descriptor)
            return
    with io.FileIO(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
