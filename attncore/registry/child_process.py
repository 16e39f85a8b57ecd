"""Running Python in a child process with a time limit, so that its hang or crash is a sentence here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attncore.registry.printable import MAX_PART, one_line
from attncore.search_path import without_current_folder

MAX_BYTES = 1 << 24
"""Bytes of a child's answers beyond which the rest is not read."""


def run_in_child(arguments: Sequence[str], timeout: float) -> str:
    """Run ``python`` with ``arguments`` in a child process, killed with its own children after ``timeout`` seconds.

    Returns how it failed, as a sentence; empty where it ended with code 0. Its output is dropped. The current folder is
    not searched for modules. A grandchild that has left the process's session is neither killed nor waited for.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(without_current_folder())}
    with tempfile.TemporaryFile() as errors:  # a pipe would stay open until the last grandchild ends
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # -P: the current folder is not on the path
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            return f"no process can be started: {error}"
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"it gave no answer within {timeout:g} s"
        finally:
            _kill_group(process)
        if process.returncode < 0:
            return f"the process died of {_signal_name(-process.returncode)}"
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
            last = one_line(errors.read(4096).decode(errors="replace").strip().rpartition("\n")[2], MAX_PART)
            return f"the process ended with code {process.returncode}" + (f" ({last})" if last else "")
        return ""


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
