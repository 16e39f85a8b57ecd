"""Plugins that close, detach, wrap or redirect the standard streams: a command prints its own output all the same."""

import json
import os
import resource
import subprocess
import sys

import pytest
from planting import SPEC

ROUGH = {
    "closes": "sys.stdout.close(); sys.stderr.close()",
    "closes the first ones": "sys.__stdout__.close(); sys.__stderr__.close()",
    "closes the buffers": "sys.stdout.buffer.close(); getattr(sys.stderr.buffer, 'raw', sys.stdout.buffer).close()",
    "detaches": "sys.stdout.detach(); sys.stderr.detach()",
    "detaches and closes": "sys.stdout.detach().close(); sys.__stdout__.detach().close()",
    "wraps": "sys.stdout = io.TextIOWrapper(sys.stdout.buffer); sys.stderr = io.TextIOWrapper(sys.stderr.buffer)",
    "wraps what it detaches": "sys.stdout = io.TextIOWrapper(sys.stdout.detach()); print('said', flush=True)",
    "opens the descriptors": "open(sys.stdout.fileno(), 'w').close()",
    "reconfigures": "sys.stdout.reconfigure(encoding='utf-16'); sys.stderr.reconfigure(encoding='utf-32')",
    "takes them away": "del sys.stdout, sys.stderr, sys.__stdout__; sys.__stderr__ = 3",
    "puts closed ones there": "sys.stdout = sys.stderr = io.StringIO(); sys.stdout.close()",
    "redirects the descriptors": "n = os.open(os.devnull, os.O_RDWR); [os.dup2(n, i) for i in (0, 1, 2)]",
    "closes the descriptors": "os.close(1); os.close(2)",
    "closes all but the first ones": "os.closerange(3, 1024)",
    "opens others in their place": "os.closerange(3, 99); [os.open(os.devnull, os.O_WRONLY) for _ in range(20)]",
    "keeps them": "import logging; logging.basicConfig(level=10); logging.info('said')",
}
CHECK = " check=lambda request, host: exec(ROUGH) or (),"


@pytest.fixture
def python(site):
    """Runs Python in a process of its own that sees the planted plugins."""

    def run(*words):
        path = os.pathsep.join(path for path in sys.path if path)
        environ = {**os.environ, "PYTHONPATH": path, "ATTNCORE_PLUGINS": "aaa,good,reference"}
        return subprocess.run([sys.executable, *words], env=environ, capture_output=True, check=False, timeout=100)

    site.plugin("good")
    return run


def plant(site, how, when):
    if "closerange" in how and resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("the process may have no descriptor that such a plugin does not close")
    source = f"import io, os, sys\nROUGH = {how!r}\n" + (f"{how}\n" if when == "import" else "")
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=CHECK if when == "check" else ""))


def check_own_output(done, key=None):
    """Only JSON is on standard output, it has the three backends as loaded or usable, and no traceback is beside it."""
    assert done.returncode == 0, done
    assert not [words for words in (b"Traceback", b"Exception ignored") if words in done.stderr], done.stderr
    rows = json.loads(done.stdout)[key] if key else json.loads(done.stdout)
    states = {row["name"]: row["state" if "state" in row else "usable"] for row in rows}
    assert [states[name] in ("loaded", True) for name in ("aaa", "good", "reference")] == [True] * 3, states


@pytest.mark.parametrize("how", ROUGH)
def test_a_plugin_at_import(site, python, how):
    plant(site, ROUGH[how], "import")
    check_own_output(python("-m", "attncore", "list", "--json"))
    listed = python("-m", "attncore", "list")
    assert b"reference" in listed.stdout
    assert b"said" not in listed.stdout
    refused = python("-m", "attncore", "explain", "--assume", "nothing")
    assert (refused.returncode, refused.stdout) == (2, b"")
    refused = python("-m", "attncore", "verify", "absent")
    assert (refused.returncode, refused.stdout) == (3, b"")
    assert b"\nattncore: error: " in b"\n" + refused.stderr


@pytest.mark.parametrize("how", ROUGH)
def test_a_plugin_that_checks_a_request(site, python, how):
    plant(site, ROUGH[how], "check")
    check_own_output(python("-m", "attncore", "explain", "--json"), "backends")
    assert b"reference" in python("-m", "attncore", "explain").stdout


def test_a_plugin_that_the_doctor_asks(site, python):
    plant(site, ROUGH["closes"], "import")
    check_own_output(python("-m", "attncore", "doctor", "--no-create", "--json"), "backends")


@pytest.mark.parametrize("how", ROUGH)
def test_a_program_that_asks_for_the_backends_prints_its_own(site, python, how):
    plant(site, ROUGH[how], "import")
    program = """
import os, sys
before = [getattr(sys, name) for name in ("stdout", "stderr", "__stdout__", "__stderr__")]
import attncore
assert "good" in repr(attncore.backends())
assert [getattr(sys, name) for name in ("stdout", "stderr", "__stdout__", "__stderr__")] == before
print("printed", flush=True)
print("complained", file=sys.stderr, flush=True)
os.write(1, b"written\\n")
os.write(2, b"noted\\n")
"""
    done = python("-c", program)
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-2:] == [b"printed", b"written"]
    assert done.stderr.splitlines()[-2:] == [b"complained", b"noted"]


def test_a_plugin_that_closes_all_descriptors_but_the_first_leaves_those(site, python):
    """The copies of them are gone, so that nothing can be restored; the plugin did not touch them."""
    plant(site, "os.closerange(3, os.sysconf('SC_OPEN_MAX'))", "import")
    program = """
import os, sys
import attncore
before = [os.fstat(number) for number in (1, 2)]
assert "good" in repr(attncore.backends())
assert [os.path.samestat(os.fstat(number), one) for number, one in zip((1, 2), before)] == [True, True]
print("printed", flush=True)
print("complained", file=sys.stderr, flush=True)
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"printed\n", b"complained\n")
