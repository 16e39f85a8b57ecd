"""The exit code of a command is that of the command, whatever a backend does to how the process ends."""

import json
import os
import subprocess
import sys

import pytest

from attncore.cli import main

WRONG = """
import atexit, os, sys, threading
from attncore.reference import ReferenceBackend, ReferenceImpl

def at_the_end(*_):
    print("called", file=sys.stderr)
    {end}

def waits():
    threading.main_thread().join()
    at_the_end()

class Impl(ReferenceImpl):
    def forward(self, *args, **kwargs):
        {once}
        found = super().forward(*args, **kwargs)
        return found.mul_({factor})

class Backend(ReferenceBackend):
    impl_class = Impl

{imported}
"""
REPLAY = ("attncore", "replay", "--backend", "wrong", "--requests", "2", "--head-size", "64")
KIT = ("attncore.testing", "wrong", "--examples", "1", "-k", "test_decode")
IN_FORWARD = "once = getattr(Backend, 'once', False) or (setattr(Backend, 'once', True), {})"


def run(site, *words, end="pass", once="pass", imported="", factor=3):
    site.plugin("wrong", heavy=WRONG.format(end=end, once=once, imported=imported, factor=factor))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-m", *words]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)


REGISTERS = "atexit.register(at_the_end)"


@pytest.mark.parametrize(
    ("words", "where", "end"),
    [
        (REPLAY, "imported", "os._exit(0)"),
        (REPLAY, "once", "sys.exit(0)"),
        (REPLAY, "once", "1/0"),
        (KIT, "once", "os._exit(0)"),
    ],
)
def test_what_is_done_at_the_exit_does_not_change_it(site, words, where, end):
    done = run(site, *words, end=end, **{where: REGISTERS if where == "imported" else IN_FORWARD.format(REGISTERS)})
    assert done.returncode == 1
    assert "called" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_thread_that_outlives_the_command_does_not_change_it(site):
    done = run(site, *REPLAY, end="os._exit(0)", imported="threading.Thread(target=waits).start()")
    assert done.returncode == 1
    assert "a thread ends the process with os._exit(0)" in done.stderr


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forward_that_ends_the_process_is_no_success(site, end):
    done = run(site, *REPLAY, once=end, factor=1)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("attncore: error: backend ")
    assert " failed in forward of layer 'layers.0': SystemExit: " in done.stderr


def test_a_thread_that_ends_the_process_is_no_success(site):
    thread = IN_FORWARD.format("[one := threading.Thread(target=os._exit, args=(0,)), one.start(), one.join()]")
    done = run(site, *REPLAY, once=thread, factor=1)
    assert (done.returncode, done.stderr) == (1, "attncore: error: a thread ends the process with os._exit(0)\n")


def test_functions_that_are_taken_back_are_not_called(site):
    registers = "atexit.register(at_the_end); atexit.unregister(at_the_end)"
    done = run(site, *REPLAY, imported=registers, factor=1)
    assert (done.returncode, done.stderr) == (0, "")


SWALLOWED = """
import signal, time, weakref
class Lock: pass
def freed(_): os.kill(os.getpid(), signal.SIGTERM); [None for _ in range(100)]
def swallowed():
    lock = Lock()
    kept = weakref.ref(lock, freed)
    del lock
    time.sleep(0.1)
"""


def test_a_signal_that_arrives_in_a_callback_ends_the_kit(site):
    """Python, and pytest, go on after what the callback of a weak reference raises."""
    done = run(site, *KIT, once=IN_FORWARD.format("swallowed()"), imported=SWALLOWED, factor=1)
    assert (done.returncode, "Traceback" in done.stderr + done.stdout) == (143, False)


FORKS = "(child := os.fork()) and os.waitpid(child, 0)"
METHOD = """
def forks(self, *args, **kwargs):
    found = ReferenceBackend.{name}(self, *args, **kwargs)
    {forks}
    return found
Backend.{name} = forks
"""


@pytest.mark.parametrize("where", ["", "__init__", "impl", "allocate_kv_cache", "plan"])
def test_a_child_that_is_forked_before_the_first_step_prints_nothing(site, tmp_path, where):
    """Where the module is imported (""), or in a method: a second process would print a second document."""
    steps = tmp_path / "steps.jsonl"
    imported = METHOD.format(forks=FORKS, name=where) if where else FORKS
    done = run(site, *REPLAY, "--json", "--save-steps", str(steps), imported=imported, factor=1)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)
    assert steps.exists()


@pytest.mark.parametrize("end", ["0", "1 / 0"])
def test_a_child_that_a_backend_forks_prints_nothing(site, tmp_path, end):
    """Nor does it move or remove a file that is being written."""
    forks = f"[(child := os.fork()) and os.waitpid(child, 0), child or {end}]"
    steps = tmp_path / "steps.jsonl"
    done = run(site, *REPLAY, "--json", "--save-steps", str(steps), once=IN_FORWARD.format(forks), factor=1)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)
    assert steps.exists()


@pytest.mark.parametrize("words", [["verify", "reference"], ["bench", "reference"], ["replay", "trace.csv"]])
def test_a_current_folder_that_is_gone(words, capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    said = "attncore: error: the current folder is gone: torch cannot run there; change to one that exists\n"
    assert capsys.readouterr().err == said
    monkeypatch.undo()
