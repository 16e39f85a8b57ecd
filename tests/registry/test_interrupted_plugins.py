"""An interrupt in a call that runs plugins' code leaves the process as it was, and the other threads their turn."""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest
from interrupted_calls import AtOpcode
from planting import SPEC
from process_changes import ASKED, settings

import attncore
from attncore.registry.plugins import load, plugin_code

ROUGH = """
import os, sys
sys.path.append("/of-the-plugin")
sys.stdout = sys.stderr = None
os.chdir("/")
os.close(1)
os.environ["ATTNCORE_STRICT_PLUGINS"] = "x"
"""
CHECK = "import attn_aaa_check\n"


class OnceAtOpcode(AtOpcode):
    """As AtOpcode, once: the function that traces is one of the settings that are restored."""

    def _trace(self, frame, event, argument):
        return None if self.fired else super()._trace(frame, event, argument)


def plant(site):
    site.module("attn_aaa_check", f"def check(request, host):\n    exec({ROUGH!r})\n    yield 'no'")
    extra = " check=attn_aaa_check.check,"
    site.plugin("aaa", ROUGH + CHECK + SPEC.format(name="aaa", module="attn_aaa", extra=extra))


def found():
    """What an interrupt may leave changed, the open descriptors among it."""
    descriptors = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]}
    return settings(), sys.unraisablehook, os._exit, sys.__stdout__, sys.__stderr__, descriptors


def check_others(monkeypatch):
    """Another thread gets its turn at once."""
    monkeypatch.setattr(plugin_code, "LONGEST_WAIT", 0.0)
    names = []
    thread = threading.Thread(target=lambda: names.extend(one.name for one in attncore.backends()))
    thread.start()
    thread.join()
    assert "reference" in names


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list a process's descriptors")
@pytest.mark.parametrize("call", ["load", "check"])
def test_opcodes(site, monkeypatch, tmp_path, call):
    """The same call again and again, interrupted some opcodes later each time, until it is not interrupted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNCORE_PLUGINS", "aaa,reference")
    plant(site)
    attncore.select(**ASKED)
    before, count = found(), 0
    while True:
        if call == "load":
            load.forget()
            sys.modules.pop("attn_aaa", None)
        with OnceAtOpcode(count) as interrupt:
            load.registry() if call == "load" else load_checked()
        assert found() == before, count
        if not interrupt.fired:
            break
        count += 1 if count < 60 or call == "check" else 3
    assert count > 400
    check_others(monkeypatch)


def load_checked():
    plugin_code.run_plugin_code("attn-aaa 1.0", exec, ROUGH, {})


ALARMS = """
import os, random, signal, sys, threading
import attncore
from attncore.registry.plugins import plugin_code
attncore.backends()
def found():
    open_ones = [name for name in os.listdir("/proc/self/fd")]
    return sys.unraisablehook, os._exit, sys.stdout, sys.stderr, sys.gettrace(), len(open_ones)
before, raised = found(), 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
for i in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 6e-4))
        while True:
            if i % 2: attncore.backends()
            else: plugin_code.run_plugin_code("it", int)
    except KeyboardInterrupt:
        raised += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert found() == before, (found(), before)
plugin_code.LONGEST_WAIT = 0.0
names = []
thread = threading.Thread(target=lambda: names.extend(one.name for one in attncore.backends()))
thread.start(); thread.join()
print(raised, "reference" in names)
"""


def run(program, **environ):
    path = os.pathsep.join(path for path in sys.path if path)
    words = [sys.executable, "-c", program]
    environ = {**os.environ, "PYTHONPATH": path, **environ}
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list a process's descriptors")
def test_alarms():
    done = run(ALARMS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "400 True\n", "")


FAST = """
import signal
class Mine(BaseException): pass
def raises(*_): raise Mine
signal.signal(signal.SIGALRM, raises)
signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)
"""


@pytest.mark.parametrize("where", ["import", "check"])
def test_a_fast_timer_whose_handler_raises_is_stopped(site, where):
    program = f"""
import signal
import attncore
assert "good" in [one.name for one in attncore.backends()]
for _ in range(3):
    assert attncore.select(**{ASKED!r}, prefer=["good"]).name == "good"
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
"""
    site.plugin("good")
    check = f"\ndef check(request, host):\n    exec({FAST!r}, {{}})\n    return ()\n"
    extra = " check=check," if where == "check" else ""
    last = "" if where == "check" else FAST
    site.plugin("aaa", check + SPEC.format(name="aaa", module="attn_aaa", extra=extra) + last)
    for _ in range(5):
        done = run(program, ATTNCORE_PLUGINS="aaa,good,reference")
        assert (done.returncode, done.stderr) == (0, "")
