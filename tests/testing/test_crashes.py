"""python -m attncore.testing: a backend that crashes its process leaves the table of the tests before."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from testing import faulty_backend
from testing.faulty_backend import forward

from attncore.testing.__main__ import main

IN_PREFILL = """
if "::test_prefill " in os.environ["PYTEST_CURRENT_TEST"]:
    {does}
return whole(query, key, value, kv_cache, metadata, output)
"""
CRASHES = {
    "abort": ("os.abort()", "the process died of SIGABRT"),
    "segfault": ("os.kill(os.getpid(), signal.SIGSEGV)", "the process died of SIGSEGV"),
    "exit_of_c": ("ctypes.CDLL(None)._exit(0)", "the process ended with code 0"),
    "exit_of_a_thread": (
        "threading.Thread(target=os._exit, args=(0,)).start() or time.sleep(100)",
        "the process ended with code 1",
    ),
}


def plant(site, name, code):
    light = faulty_backend.LIGHT.format(name=name, facts="dict()")
    site.plugin(name, light, heavy=f"import ctypes, os, signal, threading, time\n{faulty_backend.HEAVY}{code}")


@pytest.fixture
def command(site, tmp_path):
    """A function that starts the command for a backend of the site; files are temporary in its attribute."""

    def started(name, *options):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environ["TMPDIR"] = str(started.folder)
        words = [sys.executable, "-m", "attncore.testing", name, "--examples", "2", *options]
        return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    started.folder = tmp_path / "temporary"
    started.folder.mkdir()
    return started


def ended(command, name, *options):
    with command(name, *options) as process:
        out, err = process.communicate(timeout=100)
    assert not list(command.folder.glob("attncore-conformance-*"))
    return process.returncode, out, err


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_leaves_the_table_of_the_tests_before_it(site, command, kind):
    does, how = CRASHES[kind]
    plant(site, kind, forward(IN_PREFILL.format(does=does)))
    code, out, err = ended(command, kind, "--json", "-k", "test_prefill or test_decode or test_mixed")
    table = json.loads(out)
    assert code == 1
    assert (table["backend"], table["distribution"], table["version"]) == (kind, f"attn-{kind}", "1.0")
    states = [(row["capability"], row["state"]) for row in table["rows"]]
    assert states == [("decode", "supported"), ("prefill", "failed")]
    reason = f"{how} in this test, and those after it were not run"
    assert table["failures"] == [{"test": "test_prefill", "reason": reason}]
    last = err.splitlines()[-1]
    assert last == f"attncore: error: {kind}: {how} in test_prefill, test 2 of the run; those after it were not run"


def test_a_crash_is_a_table_in_markdown_too(site, command):
    plant(site, "aborts", forward("os.abort()"))
    code, out, _ = ended(command, "aborts", "-k", "test_prefill or test_decode")
    assert code == 1
    assert out.endswith(
        "attncore conformance: aborts\n| capability | state | passed | reason |\n|---|---|---|---|\n"
        "| decode | failed | 0 of 1 | the process died of SIGABRT in this test, and those after it were not run |\n"
        "FAILED decode: test_decode\n"
    )


def test_a_crash_before_the_first_test_is_a_line(site, command):
    site.plugin("early", "import os\nos.abort()\n")
    code, out, err = ended(command, "early")
    assert (code, out) == (1, "")
    assert err.endswith("attncore: error: early: the process died of SIGABRT before its first test\n")


def test_a_crash_after_the_table_is_said(site, command):
    crash = "class Crash:\n    def __del__(self): os.abort()\nsys.modules['crashes_at_the_end'] = Crash()\n"
    plant(site, "late", f"import sys\nkept = []\n{crash}")
    code, out, err = ended(command, "late", "-k", "test_prefill", "--json")
    assert code == 1
    assert json.loads(out)["rows"][0]["state"] == "supported"
    assert err.endswith("attncore: error: late: the process died of SIGABRT after its last test\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_told_to_end_ends_its_tests(site, command, tmp_path, number, code):
    runs = tmp_path / "runs"
    waits = f"os.rename(open({str(runs)!r} + '.', 'w').name, {str(runs)!r})\ntime.sleep(100)"
    plant(site, "waits", forward(waits))
    with command("waits", "-k", "test_decode") as process:
        while not runs.exists():
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=50)  # its streams are closed: the tests have ended
    assert process.returncode == code
    assert "Traceback" not in out + err


def test_a_command_that_is_killed_leaves_no_tests_running(site, command, tmp_path):
    runs = tmp_path / "runs"
    waits = f"os.rename(open({str(runs)!r} + '.', 'w').name, {str(runs)!r})\ntime.sleep(100)"
    plant(site, "waits", forward(waits))
    with command("waits", "-k", "test_decode") as process:
        while not runs.exists():
            time.sleep(0.05)
        process.kill()
        process.communicate(timeout=50)  # its streams are closed: the tests have ended
    assert process.returncode == -signal.SIGKILL


def test_the_help_says_it(capsys):
    assert main(["--help"]) == 0
    assert "the one that ran has failed, and the exit code is 1" in " ".join(capsys.readouterr().out.split())
