"""Running a module in a child process with a time limit, so that its hang or crash is a sentence here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence


def run_in_child(module: str, arguments: Sequence[str], timeout: float) -> str:
    """Run ``python -m module`` in a child process, killed with its own children after ``timeout`` seconds.

    Returns how it failed, as a sentence; empty where it ended with code 0. Its output is dropped. The current folder is
    not searched for modules. A grandchild that has left the process's session is neither killed nor waited for.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryFile() as errors:  # a pipe would stay open until the last grandchild ends
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: the current folder is not on the path
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )
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
            last = errors.read(4096).decode(errors="replace").strip().rpartition("\n")[2]
            return f"the process ended with code {process.returncode}" + (f" ({last[:200]})" if last else "")
        return ""


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
