"""The line of docs/install.md in a shell's start-up file: what a tab then completes, in the shell itself."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncore.cli import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "install.md"
BEFORE = {
    "zsh": "PROMPT='ready> '\nautoload -Uz compinit\ncompinit -u -D\n",
    "tcsh": "set prompt='ready> '\nset autolist\n",
    "fish": "",
}
FILE = {"zsh": ".zshrc", "tcsh": ".tcshrc", "fish": ".config/fish/config.fish"}
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")
SECONDS = 60
CASES = [
    ("attncore ex", ["explain"]),
    ("attncore ", list(COMMANDS)),
    ("attncore show ", ["reference"]),
    ("attncore verify refer", ["reference"]),
    ("attncore explain --assume-p", ["package"]),
    ("attncore build --kernels ", ["cython", "numba"]),
    ("attncore build bat", ["batches.jsonl"]),
    ("attncore explain --backend refer", ["reference"]),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with files to complete and the command that the page's lines call."""
    pytest.importorskip("shtab", reason="shtab (the extra completion) is not installed")
    command = tmp_path / "bin" / "attncore"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m attncore "$@"\n')
    command.chmod(0o755)
    (tmp_path / "batches.jsonl").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ZDOTDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(shell, home):
    """``shell``'s start-up file, with the line of the page."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (line,) = re.findall(rf"^    (.*) +# {shell}: ", PAGE.read_text(), re.M)
    file = home / FILE[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(BEFORE[shell] + line + "\n")


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, shell):
        self.pid, self.end = pty.fork()
        if not self.pid:
            os.execvp(shell, [shell, "-i"])

    def read_until(self, *texts):
        """What it prints until each of ``texts`` is there."""
        read, last = "", time.monotonic() + SECONDS
        while not all(text in ESCAPES.sub("", read) for text in texts):
            ready, _, _ = select.select([self.end], [], [], max(0.0, last - time.monotonic()))
            assert ready, f"{texts} not in {read!r}"
            read += os.read(self.end, 1 << 16).decode(errors="replace")
        return read

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.end)


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_a_tab_completes(shell, home):
    started(shell, home)
    terminal = Terminal(shell)
    try:
        terminal.read_until("ready> ")
        for typed, found in CASES:
            os.write(terminal.end, f"{typed}\t".encode())
            terminal.read_until(typed, *found)
            os.write(terminal.end, b"\x15\x0c")  # the line is emptied, the screen redrawn
            terminal.read_until("ready> ")
    finally:
        terminal.close()


@pytest.mark.parametrize(("typed", "found"), CASES)
def test_fish_completes(typed, found, home):
    started("fish", home)
    done = subprocess.run(["fish", "-c", f"complete -C '{typed}'"], capture_output=True, text=True, timeout=SECONDS)
    offered = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert done.stderr == ""
    assert all(any(word.endswith(one) for word in offered) for one in found), done.stdout
    assert all(word.startswith(typed.rpartition(" ")[2]) for word in offered)
