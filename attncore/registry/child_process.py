"""Running Python in a child process with a time limit, so that its hang or crash is a sentence here."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attncore.json_output import json_text
from attncore.quoted import MAX_PART, describe_error, one_line
from attncore.search_path import without_current_folder
from attncore.temporary_folder import write_temporary

MAX_BYTES = 1 << 24
"""Bytes of a child's answers beyond which the rest is not read."""

NO_ANSWER = "it gave no answer"
"""What the sentence about a child that was killed after its time begins with."""

NOT_STARTED = "no process can be started"
"""The same of one that the system has not started."""

_LAST, _PIPE = 4096, 1 << 20
"""Bytes that are kept of what a child writes to standard error, and that are read at once: all that a pipe can hold."""


def run_in_child(arguments: Sequence[str], timeout: float) -> str:
    """Run ``python`` with ``arguments`` in a child process, killed with its own children after ``timeout`` seconds.

    Returns how it failed, as a sentence; empty where it ended with code 0. Its output is dropped, however much it is,
    and fills no file. The current folder is not searched for modules. A grandchild that has left the process's session
    is neither killed nor waited for, and loses its standard error.
    """
    path = without_current_folder()
    # One with a colon in it would be read as two, of which the second may be a folder below the current one.
    named = [one for one in path if os.pathsep not in one]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(named)}
    if named != path:
        arguments = _with_path(path, arguments)
    try:
        reader, writer = os.pipe()  # not a file, which a child that never stops writing would fill the disk with
    except OSError as error:  # too many files are open
        return f"{NOT_STARTED}: {error}"
    # Between vfork and exec this process waits, whatever arrives. A Ctrl-Z would stop the child there, and so both.
    found = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP,))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: the current folder is not on the path
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writer,
            env=environ,
            start_new_session=True,
            cwd=_folder(),
        )
    except OSError as error:
        os.close(reader)
        return f"{NOT_STARTED}: {error}"
    finally:
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, found)
    try:
        last = _read_until_ended(reader, process, time.monotonic() + timeout)
    finally:
        _kill_group(process)
        os.close(reader)
    if last is None:
        return f"{NO_ANSWER} within {timeout:g} s"
    if process.returncode:
        said = one_line(last.decode(errors="replace").strip().rpartition("\n")[2], MAX_PART)
        return how_it_ended(process.returncode) + (f" ({said})" if said and process.returncode > 0 else "")
    return ""


def _with_path(path: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Arguments of Python, ``-c PROGRAM ...`` or ``-m MODULE ...``, that search ``path`` first; others as they are."""
    how, what, *rest = arguments
    run = f"import runpy; runpy.run_module({what!r}, run_name='__main__', alter_sys=True)"
    programs = {"-c": what, "-m": run}
    return ["-c", f"import sys; sys.path[:0] = {path!r}\n{programs[how]}", *rest] if how in programs else [*arguments]


def _read_until_ended(reader: int, process: subprocess.Popen[bytes], end: float) -> bytes | None:
    """The last of what a process writes to a pipe before it ends; None where it has not ended in time.

    The pipe is closed when the last grandchild ends, which is not waited for. It is asked once more when the time is
    over: this process may have been stopped meanwhile, by Ctrl-Z, for longer than the other one had.
    """
    last, is_open = b"", True
    while True:
        left = end - time.monotonic()
        ended = process.poll() is not None  # asked before the read: what it wrote is in the pipe by then
        if is_open and _readable(reader, 0 if ended else max(0.0, min(left, 0.05))):
            part = os.read(reader, _PIPE)
            is_open, last = bool(part), (last + part)[-_LAST:]
        if ended:
            return last
        if left <= 0:
            return None
        if not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left)


def _folder() -> str | None:
    """None, the current folder; the root where that one has been deleted, in which no interpreter starts."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def run_in_fork(call: Callable[[], str], timeout: float, memory: int) -> tuple[str, str]:
    """Call ``call`` in a copy of this process, which may take ``timeout`` seconds and ``memory`` more bytes.

    Returns the text that ``call`` returned, and how the copy failed, as a sentence; one of them is empty. Cheap where
    much is imported already. ``call`` sees this process's memory and changes none of it; it must wait for no thread and
    use no GPU: a copy has neither. Where the system does not tell how much a process has, memory is not limited.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the process may have threads
        child = os.fork()
    if child == 0:
        _be_copy(call, writer, timeout, memory)
    os.close(writer)
    try:
        answer = _read_until(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        return "", f"{NO_ANSWER} within {timeout:g} s"
    try:
        found: tuple[str, str] = tuple(json.loads(answer))
    except ValueError:
        return "", how_it_ended(os.waitstatus_to_exitcode(status))
    return found


def _be_copy(call: Callable[[], str], writer: int, timeout: float, memory: int) -> None:
    """What the copy does; it never returns into the code that this process was in."""
    code = 1
    try:
        os.setsid()  # an interrupt of the terminal is the first process's, which ends this one
        _limit(resource.RLIMIT_CPU, int(timeout) + 1)  # and this one ends where the first was killed
        if (taken := _address_space()) is not None:
            _limit(resource.RLIMIT_AS, taken + memory)
        try:
            answer = (call(), "")
        except Exception as error:
            answer = ("", describe_error(error))
        with open(writer, "wb", closefd=False) as file:
            file.write(json_text(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _address_space() -> int | None:
    """Bytes of this process's address space; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _read_until(reader: int, end: float) -> bytes | None:
    """What is written to a pipe until it is closed; None where it is not closed in time."""
    data = b""
    while _readable(reader, max(0.0, end - time.monotonic())):
        if not (part := os.read(reader, 65536)):
            return data
        data += part
    return None


def _readable(reader: int, seconds: float) -> bool:
    """Whether a pipe has bytes, or its end, within so many seconds."""
    poll = select.poll()  # select.select takes no descriptor from 1024 on
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def tell(file: Path, **facts: Any) -> None:
    """Add an answer to ``file``, as ``read_answers`` reads it.

    The file is opened for each: a plugin that closes descriptors of others by their numbers finds none of it.
    """
    write_temporary(file, json_text(facts).encode() + b"\n", more=True)


def read_answers(file: Path) -> list[dict[str, Any]]:
    """The JSON objects that a child has written to ``file``, one a line.

    What is no such line, as the last one of a child that was killed while it wrote, is left out.
    """
    try:
        if not file.is_file():  # the child may have put a pipe in its place
            return []
        with file.open("rb") as opened:
            lines = opened.read(MAX_BYTES).splitlines()
    except OSError:
        return []
    return [answer for answer in map(_json_or_none, lines) if isinstance(answer, dict)]


def _json_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def how_it_ended(code: int) -> str:
    """A sentence for what ``subprocess`` calls the return code of a process, which is a signal's below 0."""
    return f"the process died of {_signal_name(-code)}" if code < 0 else f"the process ended with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
