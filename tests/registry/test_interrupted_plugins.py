"""An interrupt in a call that runs plugins' code leaves the process as it was, and the other threads their turn."""

import os
import subprocess
import sys
import threading

import pytest
from interrupted_calls import AtTracedOpcode
from planting import SPEC
from process_changes import settings

import attncore
from attncore.registry.plugins import plugin_code

ROUGH = """
import os, sys
sys.path.append("/of-the-plugin")
sys.stdout = sys.stderr = None
os.chdir("/")
os.close(1)
os.environ["ATTNCORE_STRICT_PLUGINS"] = "x"
"""


class OnceAtOpcode(AtTracedOpcode):
    """As AtTracedOpcode, once: the function that traces is one of the settings that are restored."""

    def _trace(self, frame, event, argument):
        return None if self.fired else super()._trace(frame, event, argument)


def found():
    """What an interrupt may leave changed, the open descriptors among it."""
    descriptors = sorted(os.listdir("/proc/self/fd"))
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
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 41])
def test_opcodes(stride, monkeypatch, tmp_path):
    """The same call again and again, interrupted some opcodes later each time, until it is not interrupted."""
    monkeypatch.chdir(tmp_path)
    before, count = found(), 0
    while True:
        with OnceAtOpcode(count) as interrupt:
            plugin_code.run_plugin_code("attn-aaa 1.0", exec, ROUGH, {})
        sys.settrace(None)
        assert found() == before, count
        if not interrupt.fired:
            break
        count += stride if count < 300 else 7 * stride
    assert count > 400
    check_others(monkeypatch)


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


SWALLOWS = """
import os, signal, time
class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.{signal})
        time.sleep(30)
try:
    Slow()
    {after}
except BaseException:
    pass
"""


@pytest.mark.parametrize("after", ["pass", "time.sleep(30)"], ids=["at its end", "before it hangs"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_an_object_of_a_plugin_s_that_goes_away_is_not_lost(site, name, code, after):
    """Python prints what ``__del__`` raises, and goes on."""
    source = SWALLOWS.format(signal=name, after=after)
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    done = run("import sys; sys.argv[1:] = ['list']; import runpy; runpy.run_module('attncore', run_name='__main__')")
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr


def test_without_the_command_it_is_raised_too(site):
    source = SWALLOWS.format(signal="SIGINT", after="pass")
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    done = run("import attncore\ntry: attncore.backends()\nexcept KeyboardInterrupt as e: print(e.__notes__)")
    assert done.stdout == "['while aaa (attn-aaa 1.0) was loaded']\n"
