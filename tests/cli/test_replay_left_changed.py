"""What a backend's call leaves changed of the process in a replay: streams, timers and signals."""

import json
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from cli.failing_backend import CALLS, planter, replayed

from attncore.replay.runner import replay


@pytest.fixture
def acme(site):
    """Plants the backend ``acme`` whose methods begin with the statements given."""
    return planter(site)


LEFT = {
    "none": "sys.stdout = sys.stderr = sys.__stdout__ = None",
    "a text": "sys.stdout, sys.stderr = io.StringIO(), io.StringIO()",
    "closed": "sys.stdout = sys.stderr = io.StringIO(); sys.stdout.close()",
    "nowhere": "sys.stdout = sys.stderr = type('N', (), dict(write=len, flush=id, isatty=callable))()",
}


def streams_of_sys():
    return {name: getattr(sys, name) for name in ("stdout", "stderr", "__stdout__")}


@pytest.fixture
def streams(capsys):
    """Those of ``sys`` are put back where a test fails, before ``capsys`` ends."""
    found = streams_of_sys()
    yield
    for name, stream in found.items():
        setattr(sys, name, stream)


@pytest.mark.parametrize("words", [[], ["--json"], ["--save-steps", "steps.jsonl"]])
@pytest.mark.parametrize("how", LEFT)
@pytest.mark.usefixtures("streams")
def test_a_backend_that_leaves_other_streams_loses_no_report(how, words, acme, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    acme(forward=f"import io, sys; {LEFT[how]}")
    streams = streams_of_sys()
    code, out, err = replayed(capsys, trace, *words)
    assert (code, err) == (1, ""), err  # of a backend that returns the query
    assert streams_of_sys() == streams
    assert json.loads(out)["verification"] if words == ["--json"] else "failed: " in out
    assert ("steps written to steps.jsonl" in out) == (len(words) == 2)


@pytest.mark.parametrize("where", ["init", "impl", "plan", "allocate", "forward"])
@pytest.mark.parametrize("how", LEFT)
@pytest.mark.usefixtures("streams")
def test_a_backend_that_leaves_other_streams_loses_no_error(how, where, acme, trace, capsys):
    acme(**{where: f"import io, sys; {LEFT[how]}; raise ValueError(1)"})
    code, out, err = replayed(capsys, trace)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f" failed in {CALLS.get(where, where)}: ValueError: 1" in err


ANSWERED = "signal.signal(signal.SIGALRM, lambda *_: 1 / 0)"
TIMERS = {
    "later": ("signal.setitimer(signal.ITIMER_REAL, 60)", 1, ""),
    "later, and is answered": (f"{ANSWERED}; signal.setitimer(signal.ITIMER_REAL, 60, 1e-4)", 1, ""),
    "at once": ("signal.setitimer(signal.ITIMER_REAL, 1e-4); time.sleep(9)", 142, ""),
    "of the processor": ("signal.raise_signal(signal.SIGPROF); time.sleep(9)", 155, ""),
    "at once, and is answered": (
        f"{ANSWERED}; signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4); time.sleep(9)",
        1,
        "failed in forward of layer 'layers.0': ZeroDivisionError",
    ),
    "a watchdog's": (
        "import faulthandler, sys; faulthandler.dump_traceback_later(.05, exit=True, file=sys.__stderr__)",
        1,
        "",
    ),
    "no signals": ("[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]", 1, ""),
}


@pytest.mark.parametrize("how", TIMERS)
def test_a_timer_of_a_backend_s_ends_no_process(how, acme, trace, tmp_path, capsys):
    statement, code, said = TIMERS[how]
    before = [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)]
    acme(forward=f"import signal, time; {statement}")
    try:
        found, out, err = replayed(capsys, trace, "--save-steps", str(tmp_path / "steps.jsonl"))
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert found == code
    assert said in err
    assert err.count("\n") == bool(said)
    ended = said or code != 1
    assert ("failed: " in out) != bool(ended)
    assert [path.name for path in tmp_path.iterdir() if "steps" in path.name] == ([] if ended else ["steps.jsonl"])


@pytest.mark.parametrize("where", ["init", "impl", "plan", "allocate", "forward"])
def test_a_descriptor_of_signals_that_a_backend_leaves_is_taken_away(where, acme, trace, capsys):
    """Python would print a traceback of each signal, as of Ctrl-C: the backend has closed it."""
    left = "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w); os.close(r); os.close(w)"
    acme(**{where: f"import os, signal; {left}"})
    try:
        code, _, err = replayed(capsys, trace)
    finally:
        found = signal.set_wakeup_fd(-1)
    assert (code, err, found) == (1, "", -1)  # of a backend that returns the query


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.usefixtures("streams")
def test_streams_that_a_thread_replaces_are_not_the_commands(words, acme, trace, monkeypatch, capsys):
    def replayed_and_replaced(*args, **kwargs):
        found = replay(*args, **kwargs)
        sys.stdout = sys.stderr = None
        return found

    monkeypatch.setattr("attncore.cli.replay.replay", replayed_and_replaced)
    acme()
    code, out, err = replayed(capsys, trace, *words)
    assert (code, err) == (1, "")
    assert "failed" in out


@pytest.mark.parametrize("where", ["init", "impl", "plan", "allocate", "forward"])
def test_a_recursion_limit_of_a_backend_s_ends_no_replay(where, acme, trace, capsys):
    acme(**{where: "import sys; sys.setrecursionlimit(sys.getrecursionlimit() // 4 + 30)"})
    limit = sys.getrecursionlimit()
    code, _, err = replayed(capsys, trace)
    assert (code, err, sys.getrecursionlimit()) == (1, "", limit)  # of a backend that returns the query


def test_a_timer_that_goes_on_interrupts_no_answer():
    """Its handler raises every tenth of a millisecond, in the guard around the backend's call, too."""
    program = """
import signal, sys, time
from attncore.replay.backend_code import BackendError, _Guard
guard, told = _Guard("backend acme"), 0
def call():
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    time.sleep(9)
def said():
    try:
        guard.call("forward", call)
    except BackendError:
        return signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    except ZeroDivisionError:
        return False
for _ in range(500):
    told += said()
print(told)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 500
