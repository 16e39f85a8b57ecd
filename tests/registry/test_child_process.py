"""Child processes: how they end, what they answer, and what they leave behind."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from attncore.registry import child_process
from attncore.registry.child_process import MAX_BYTES, NO_ANSWER, read_answers, run_in_child, run_in_fork

AS_CHILD = """
import atexit, pathlib, threading, time
from attncore.process_end import run_as_child
threading.Thread(target=time.sleep, args=(3600,)).start()
atexit.register(lambda: pathlib.Path({file!r}).touch())
def main():
    {does}
run_as_child(main)
"""


@pytest.mark.parametrize(
    ("does", "ended"),
    [("pass", ""), ("raise ValueError('no')", "the process ended with code 1 (ValueError: no)")],
    ids=["well", "error"],
)
def test_a_child_does_not_wait_for_threads_of_others(tmp_path, does, ended):
    assert run_in_child(["-c", AS_CHILD.format(does=does, file=str(tmp_path / "called"))], 60) == ended
    assert (tmp_path / "called").exists()


GRANDCHILD = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("pass", ""),
        ("import sys; sys.exit(3)", "the process ended with code 3"),
        ("raise ValueError('no\\x1b[31m')", "the process ended with code 1 (ValueError: no\\x1b[31m)"),
        ("raise KeyboardInterrupt", "the process died of SIGINT"),
        ("import os; os.kill(os.getpid(), 64)", "the process died of SIGRTMAX"),
        ("import sys; assert not sys.stdin.read(1)", ""),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "it gave no answer within 1 s"),
        (GRANDCHILD, ""),
    ],
    ids=["well", "code", "error", "interrupt", "signal", "reads", "writes", "grandchild"],
)
def test_how_a_child_ends_is_a_sentence(program, ended):
    started = time.monotonic()
    assert run_in_child(["-c", program], 1 if "within" in ended else 30) == ended
    assert time.monotonic() - started < 30


FLOOD = "import sys\nwhile True: sys.stderr.write('retrying\\n' * 8192)"


def test_a_child_that_writes_without_end_fills_no_disk(tmp_path, monkeypatch):
    """It would die of a file of more than 1 MiB; what it writes is read and dropped, and its last line is kept."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    assert run_in_child(["-c", limit + FLOOD], 1) == f"{NO_ANSWER} within 1 s"
    many = "sys.stderr.write('retrying\\n' * (1 << 20)); sys.exit('the last line')"
    assert run_in_child(["-c", limit + many], 30) == "the process ended with code 1 (the last line)"


def test_a_grandchild_that_writes_without_end_is_not_waited_for():
    """Its standard error is closed when the child has ended, so that it ends too."""
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FLOOD!r}], start_new_session=True)"
    started = time.monotonic()
    assert run_in_child(["-c", program + "; sys.exit(3)"], 60).startswith("the process ended with code 3")
    assert time.monotonic() - started < 30


def test_a_child_that_closes_its_streams_is_waited_for():
    assert run_in_child(["-c", "import os, time; os.closerange(0, 3); time.sleep(0.2); os._exit(3)"], 30) == (
        "the process ended with code 3"
    )


def test_a_child_that_ends_while_this_process_is_stopped_has_ended(monkeypatch):
    """As by Ctrl-Z, for longer than the child may take."""
    start, real = subprocess.Popen, child_process._readable
    started = []

    def stopped(reader, seconds):
        if (process := started[0]).returncode is None:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            monkeypatch.setattr("time.monotonic", lambda: 1e9)
        return real(reader, seconds)

    monkeypatch.setattr(child_process, "_readable", stopped)
    monkeypatch.setattr("subprocess.Popen", lambda *args, **how: started.append(start(*args, **how)) or started[0])
    assert run_in_child(["-c", "raise ValueError('no')"], 30) == "the process ended with code 1 (ValueError: no)"


def test_ctrl_z_stops_no_child_before_it_runs():
    """The parent, which waits for its start, would not stop, and take no other signal either."""
    program = "import signal; raise SystemExit(signal.SIGTSTP not in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert run_in_child(["-c", program], 30) == ""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="the system allows fewer files")
def test_a_child_is_read_by_a_process_of_many_open_files():
    opened = [os.dup(0) for _ in range(1100)]
    try:
        assert run_in_child(["-c", "import sys; sys.exit('the last line')"], 30).endswith("code 1 (the last line)")
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_child_that_cannot_be_started_is_a_sentence(monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert run_in_child(["-c", "pass"], 30).startswith("no process can be started: [Errno 2]")


def test_a_child_of_a_deleted_folder_runs(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run_in_child(["-c", "import os; os.getcwd()"], 30) == ""


def fails():
    raise ValueError("no\x1b[31m")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: "text", ("text", "")),
        (fails, ("", "ValueError: no\\x1b[31m")),
        (lambda: os._exit(3), ("", "the process ended with code 3")),
        (lambda: os.kill(os.getpid(), 64), ("", "the process died of SIGRTMAX")),
        (lambda: time.sleep(60), ("", "it gave no answer within 1 s")),
        (lambda: str(len(bytes(1 << 30))), ("", "MemoryError: without a message")),
    ],
    ids=["well", "error", "code", "signal", "waits", "memory"],
)
def test_how_a_copy_ends_is_a_sentence(call, found):
    assert run_in_fork(call, 1 if "within" in found[1] else 30, 1 << 28) == found


@pytest.mark.parametrize(
    ("written", "answers"),
    [
        (b'{"a": 1}\n{"b": 2}\n', [{"a": 1}, {"b": 2}]),
        (b'{"a": 1}\n{"phase": "do', [{"a": 1}]),
        (b'{"a": 1}\n[1]\n"x"\n\xff\n', [{"a": 1}]),
        (b'{"a": 1}\n' + b"[" * 100_000 + b"\n", [{"a": 1}]),
        (b'{"a": 1}\n{"b": ' + b"9" * 5000 + b"}\n", [{"a": 1}]),
        (b'{"a": 1}\n{"b": "' + b"x" * MAX_BYTES + b'"}\n', [{"a": 1}]),
    ],
    ids=["whole", "cut", "other values", "deep", "huge number", "long"],
)
def test_answers_are_the_whole_lines(tmp_path, written, answers):
    file = tmp_path / "answers"
    file.write_bytes(written)
    assert read_answers(file) == answers


def test_what_is_no_file_has_no_answers(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        assert read_answers(tmp_path / name) == []


def test_a_folder_with_a_colon_is_no_two_folders(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "planted.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(f"{tmp_path}/a:b")
    program = "import importlib.util; assert importlib.util.find_spec('planted') is None"
    assert run_in_child(["-c", program], 60) == ""


@pytest.mark.parametrize("how", ["-c", "-m"])
def test_a_folder_with_a_colon_is_searched_in_its_turn(tmp_path, monkeypatch, how):
    """PYTHONPATH names none; a child of the child is without it."""
    for folder in ("a:b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "planted.py").write_text(f"import sys; sys.exit({folder!r} + sys.argv[1])")
        monkeypatch.syspath_prepend(f"{tmp_path}/{folder}")
    monkeypatch.setattr("sys.path", [f"{tmp_path}/a:b", *(one for one in sys.path if one != f"{tmp_path}/a:b")])
    words = [how, "import planted" if how == "-c" else "planted", "?"]
    assert run_in_child(words, 60) == "the process ended with code 1 (a:b?)"
