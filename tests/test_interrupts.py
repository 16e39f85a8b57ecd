"""Ctrl-C before a command and after it: the process ends by the signal, and says nothing."""

import os
import signal
import subprocess
import sys

import pytest

from attncore.command import load_torch

KILL = "os.kill(os.getpid(), signal.SIGINT)"
PROGRAM = "import os, signal, sys; from attncore.interrupts import as_program; "


def run(program, **given):
    words = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, **given)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (f"as_program(lambda: {KILL})", (-signal.SIGINT, "", "")),
        (f"as_program(lambda: lambda: 0); {KILL}", (-signal.SIGINT, "", "")),
        (f"sys.exit(as_program(lambda: lambda: {KILL}))", (130, "", "")),
        ("sys.exit(as_program(lambda: lambda: 7))", (7, "", "")),
    ],
    ids=["while it is loaded", "after it", "in it", "none"],
)
def test_an_interrupt_is_no_traceback(program, found):
    assert run(program) == found


EARLY = """
import runpy, sys
before = {{*sys.modules}}
import attncore.interrupts
attncore.interrupts.as_program = lambda load: print(*sys.modules.keys() - before) or 0
runpy.run_module("{}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "name", ["attncore", "attncore.testing", "attncore.testing.kit_child", "attncore.testing.badge"]
)
def test_little_is_imported_before_an_interrupt_has_an_answer(name):
    done = subprocess.run([sys.executable, "-c", EARLY.format(name)], capture_output=True, text=True, check=True)
    loaded = {one.partition(".")[0] for one in done.stdout.split()}
    loaded -= {"__future__", *sys.builtin_module_names}  # a module of some lines, and what Python itself holds
    assert loaded == {"attncore"}, "no other takes no time"


SWALLOWED = """
import time, weakref
class Lock: pass
def freed(_): os.kill(os.getpid(), signal.SIG{name}); [None for _ in range(100)]
def command():
    lock = Lock()
    kept = weakref.ref(lock, freed)
    del lock
    for _ in range(1000): time.sleep(0.01)
    return 0
def prepared_command():
    from attncore.command import prepared
    with prepared(): return command()
sys.exit(as_program(lambda: {command}))
"""


@pytest.mark.parametrize(("name", "command", "code"), [("INT", "command", 130), ("TERM", "prepared_command", 143)])
def test_an_interrupt_in_a_callback_is_not_lost(name, command, code):
    """Python prints what the callback of a weak reference raises, and goes on."""
    assert run(SWALLOWED.format(name=name, command=command)) == (code, "", "")


def test_an_alarm_from_outside_ends_the_process_as_any_other():
    alarm = "os.kill(os.getpid(), signal.SIGALRM)"
    assert run(f"as_program(lambda: lambda: {alarm})") == (-signal.SIGALRM, "", "")


def test_after_an_interrupt_that_was_lost_an_alarm_is_one_from_outside_again():
    program = "def caught():\n    try: command()\n    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGALRM)\n"
    program = SWALLOWED.format(name="INT", command="caught").replace("def prepared_command", f"{program}def unused")
    assert run(program) == (-signal.SIGALRM, "", "")


def test_what_else_a_callback_raises_is_printed():
    program = "import weakref; a = type('A', (), {})(); r = weakref.ref(a, lambda _: 1 / 0); "
    code, out, err = run(f"{program}as_program(lambda: lambda: 0); del a")
    assert (code, out) == (0, "")
    assert "ZeroDivisionError" in err


def test_interrupts_that_are_ignored_stay_ignored():
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    assert run(f"{ignore}sys.exit(as_program(lambda: [{KILL}] and (lambda: 5)))") == (5, "", "")


@pytest.mark.parametrize("module", ["attncore", "attncore.testing"])
def test_the_commands_are_loaded_so(module, tmp_path):
    """argparse, which both commands import, is interrupted here."""
    (tmp_path / "argparse.py").write_text(f"import os, signal; {KILL}")
    program = f"import runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['list']; "
    assert run(f"{program}runpy.run_module({module!r}, run_name='__main__', alter_sys=True)") == (
        -signal.SIGINT,
        "",
        "",
    )


DROPS = f"""
import os, signal, time
try:
    {KILL}
    time.sleep(0.1)
except BaseException:
    pass  # as torch's C++ code, which imports numpy
"""


@pytest.mark.parametrize("words", ["attncore replay", "attncore bench reference", "attncore.testing reference"])
def test_an_interrupt_while_torch_is_imported_is_not_lost(words, tmp_path):
    (tmp_path / "torch.py").write_text(DROPS)
    module, *rest = words.split()
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *rest],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "attncore: error: interrupted"


def test_a_second_interrupt_does_not_wait_for_torch(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(f"import os, signal\n{KILL}\n{KILL}\n[None for _ in range(100)]\n1 / 0\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load_torch()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
