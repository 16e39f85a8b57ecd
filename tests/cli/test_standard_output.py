"""Standard output is the command's: what plugins and libraries print goes to standard error, whenever they do."""

import io
import json
import os
import subprocess
import sys

import pytest
from planting import HEAVY, SPEC

from attncore.standard_output import _own

LOUD = """
import atexit, ctypes, os, subprocess, sys, threading
C = ctypes.CDLL(None)
def shout(when):
    print("python", when)
    print("before", when, file=sys.__stdout__, flush=True)
    os.write(1, f"descriptor {when}\\n".encode())
    C.puts(f"C {when}".encode())
    subprocess.run(["echo", "child", when])
shout("import")
atexit.register(shout, "exit")
threading.Timer(0.0, shout, ["thread"]).start()
"""
CHECKS = """
def check(request, host):
    shout("check")
    return ()
"""


@pytest.fixture
def loud(site, tmp_path):
    """Runs the command in a process of its own, beside a plugin that prints in every way."""
    spec = SPEC.format(name="loud", module="attn_loud", extra=" check=check,")
    site.plugin("loud", LOUD + CHECKS + spec, heavy=HEAVY)

    def run(*words, **given):
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "ATTNCORE_PLUGINS": "loud,reference",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        return subprocess.run(
            [sys.executable, "-m", "attncore", *words],
            env=environ, text=True, check=False, timeout=300, **{"capture_output": True, **given},
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["list"], 0),
        (["explain"], 0),
        (["doctor", "--no-create"], 0),
        (["verify", "reference", "--num-heads", "2", "--num-kv-heads", "1", "--dtype", "float32"], 0),
    ],
    ids=["list", "explain", "doctor", "verify"],
)
def test_json_is_all_that_is_on_standard_output(loud, words, code):
    done = loud(*words, "--json")
    assert done.returncode == code, done.stderr
    json.loads(done.stdout)
    if words[0] != "doctor":  # which loads plugins in child processes alone
        for who in ("python", "before", "descriptor", "C", "child"):
            assert f"{who} import\n" in done.stderr
            assert f"{who} exit\n" in done.stderr


def test_a_table_is_all_that_is_on_standard_output(loud):
    done = loud("list")
    assert {"loud", "reference"} < {line.split()[0] for line in done.stdout.splitlines()}
    assert all(line.startswith("NAME") or "loaded" in line or "blocked" in line for line in done.stdout.splitlines())


def test_it_works_where_standard_error_is_closed(loud):
    done = loud("list", "--json", capture_output=False, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert done.returncode == 0
    json.loads(done.stdout)


def test_main_with_arguments_leaves_the_process_as_it_was(tmp_path):
    program = "import sys, os; from attncore.cli import main; out = sys.stdout; main(['--version']); "
    program += "assert sys.stdout is out; print('after'); sys.stdout.flush(); os.write(1, b'native\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[1:] == ["after", "native"]
    assert done.stdout.startswith("attncore ")


@pytest.mark.parametrize("how", [{"write_through": True}, {"line_buffering": True}, {}])
def test_lines_are_written_as_the_stream_before_wrote_them(how, tmp_path):
    """Else what one stream says on a terminal is behind what the other has said since."""
    file = tmp_path / "stream"
    with io.TextIOWrapper(open(file, "wb", buffering=0), encoding="utf-8", **how) as stream, _own(stream) as own:
        own.write("a line\n")
        assert file.read_text() == ("a line\n" if how else "")
    assert file.read_text() == "a line\n"
