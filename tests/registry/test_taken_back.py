"""What a plugin starts when it is imported, for later or behind attncore's back, is taken back or does no harm."""

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from planting import HEAVY, SPEC
from process_changes import ASKED

import attncore


def plant(site, source):
    site.plugin("aaa", f"{source}\n" + SPEC.format(name="aaa", module="attn_aaa", extra=""))


def command(*words):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-m", "attncore", *words]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)


def check_listed(names=("aaa", "good", "reference")):
    done = command("list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    states = {row["name"]: row["state"] for row in json.loads(done.stdout)}
    assert [states[name] for name in names] == ["loaded"] * len(names)


DROPS = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "attncore"]: del sys.modules[name]
import attncore.builder, attncore.registry.plugins.load
"""


@pytest.mark.parametrize("source", [DROPS, "import sys; sys.modules = {}"])
def test_a_plugin_that_drops_modules_breaks_itself_alone(site, source):
    """Its own spec is one of another attncore's."""
    plant(site, source)
    site.plugin("good")
    check_listed(("good", "reference"))


@pytest.mark.parametrize(
    "source",
    [
        "import attncore\nfor name in [*vars(attncore)]:\n    if not name.startswith('__'): delattr(attncore, name)",
        "import attncore\nattncore.BackendSpec = attncore.hookimpl = attncore.backends = attncore.Host = None",
    ],
    ids=["deleted", "replaced"],
)
def test_names_of_attncore_that_a_plugin_sets_or_deletes_are_those_of_before(site, source):
    """What the plugin needs of them itself it imports before: what it lacks then is no reason against others."""
    site.plugin("aaa", SPEC.format(name="aaa", module="attn_aaa", extra="") + f"\n{source}\n")
    site.plugin("good")
    check_listed(("good", "reference"))


def test_names_of_attncore_are_whole_after_a_plugin_was_loaded(site):
    before = attncore.select, attncore.BackendSpec
    for name in ("LayersChoice", "show_versions"):
        vars(attncore).pop(name, None)
    plant(site, "import attncore\nattncore.select = attncore.LayersChoice = None\ndel attncore.BackendSpec\n"
                "attncore.show_versions, attncore.others = attncore.show_versions, 5")  # fmt: skip
    try:
        attncore.backends()
        assert (attncore.select, attncore.BackendSpec) == before
        assert attncore.LayersChoice.__name__ == "LayersChoice"
        assert "show_versions" in vars(attncore)
        assert attncore.others == 5
    finally:
        vars(attncore).pop("others", None)


REPLACES = {
    "socket": "sys.modules['socket'] = object()",
    "multiprocessing": "sys.modules['multiprocessing'] = type(sys)('multiprocessing')",
    "decimal": "sys.modules['decimal'] = object()",
    "torch": "sys.modules['torch'] = object()",
    "a function of locale": "import locale; locale.setlocale = lambda *_: 1 / 0",
    "functions of gc": "import gc; gc.get_debug = gc.get_threshold = gc.isenabled = lambda: 1 / 0",
}


@pytest.mark.parametrize("source", REPLACES.values(), ids=REPLACES)
def test_a_setting_that_cannot_be_asked_for_stops_no_other_plugin(site, source):
    """What stands in the place of a module of others stays, and is asked before the next plugin is loaded."""
    plant(site, f"import sys\n{source}")
    site.plugin("good")
    check_listed()


def test_modules_of_attncore_are_those_of_before(site):
    def ours():
        return {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "attncore"}

    attncore.backends()
    plant(site, DROPS)
    site.plugin("good")
    before, packages, table = ours(), attncore.registry.plugins.load, sys.modules
    states = {one.name: one.state for one in attncore.backends()}
    assert (states["good"], states["reference"]) == ("loaded", "loaded")
    assert ours() == before
    assert attncore.registry.plugins.load is packages
    assert sys.modules is table
    assert attncore.select(**ASKED, backend="good").name == "good"


BLOCKS = {
    "of the standard library": "json, subprocess, importlib.metadata, importlib, re, logging, shutil, tempfile",
    "by which hooks are called": "pluggy, pluggy._manager",
    "of attncore": "attncore.registry, attncore.doctor, attncore.json_output, attncore.builder",
    "that arrays are of": "numpy",
}


@pytest.mark.parametrize("what", BLOCKS)
@pytest.mark.parametrize("how", ["sys.modules[name] = None", "sys.modules.pop(name, None)"])
def test_a_plugin_that_blocks_modules_blocks_nothing(site, what, how):
    plant(site, f"import sys\nfor name in {BLOCKS[what]!r}.split(', '): {how}")
    site.plugin("good")
    check_listed(("good", "reference"))  # the one that blocks pluggy is broken by that itself


def test_modules_that_a_plugin_drops_or_blocks_are_those_of_before(site):
    import email.message
    import json

    email_before, before = {name: one for name, one in sys.modules.items() if name.startswith("email")}, json
    sys.modules.pop("this", None)
    names = ["json", "json.decoder", *email_before, "this"]
    plant(site, f"import sys\nfor name in {names[::2]}: sys.modules[name] = None\nfor name in {names[1::2]}: "
                "sys.modules.pop(name, None)")  # fmt: skip
    attncore.backends()
    assert sys.modules["json"] is before
    assert sys.modules["json.decoder"] is before.decoder
    assert {name: sys.modules.get(name) for name in email_before} == email_before
    assert sys.modules["email.message"] is email.message
    assert "this" not in sys.modules  # it may be imported


def test_a_package_that_is_imported_anew_is_given_no_parts_of_before(site):
    """Parts of two copies would not fit together; and a module that another stands for stays replaced."""
    import wsgiref.headers
    import wsgiref.util

    before = wsgiref
    try:
        plant(site, "import sys\nfor name in [name for name in sys.modules if name.startswith('wsgiref')]: "
                    "del sys.modules[name]\nimport wsgiref.util")  # fmt: skip
        attncore.backends()
        assert sys.modules["wsgiref"] is not before
        assert sys.modules["wsgiref.util"] is not wsgiref.util
        assert "wsgiref.headers" not in sys.modules
    finally:
        for name, one in {"": before, ".util": before.util, ".headers": before.headers}.items():
            sys.modules[f"wsgiref{name}"] = one


def test_what_the_program_has_blocked_stays_blocked(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    plant(site, "import sys; del sys.modules['ensurepip']")
    attncore.backends()
    assert sys.modules["ensurepip"] is None


def test_what_is_imported_meanwhile_stays(site):
    sys.modules.pop("attncore.chart_page", None)
    plant(site, "import attncore.chart_page")
    attncore.backends()
    assert "attncore.chart_page" in sys.modules


def test_a_timer_that_ends_the_process_does_not(site):
    plant(site, "import faulthandler; faulthandler.dump_traceback_later(0.3, exit=True)")
    site.plugin("good", "import time; time.sleep(0.6)\n" + SPEC.format(name="good", module="attn_good", extra=""))
    check_listed()


def test_a_signal_that_is_answered_with_a_traceback_is_as_before(site):
    plant(site, f"import faulthandler; faulthandler.register({int(signal.SIGUSR1)}, chain=False)")
    assert "aaa" in [one.name for one in attncore.backends() if one.state == "loaded"]
    assert not faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.parametrize("own", [True, False])
def test_the_descriptor_of_signals_is_that_of_before_a_backend_is_created(site, own):
    left = "import os, signal\nr, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)"
    site.plugin("acme", heavy=f"{left}; os.close(r); os.close(w)\n{HEAVY}")
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    before = signal.set_wakeup_fd(ends[1] if own else -1)
    try:
        attncore.select(**ASKED, backend="acme").create()
    finally:
        found = signal.set_wakeup_fd(before)
        any(map(os.close, ends))
    assert found == (ends[1] if own else -1)


@pytest.mark.parametrize("flush", ["raise RuntimeError('mine')", "os._exit(0)", "raise SystemExit(7)"])
def test_a_log_handler_that_fails_at_the_exit_fails_no_other(site, tmp_path, flush):
    said = tmp_path / "said"
    handlers = f"""
import logging, logging.handlers, os
last = logging.handlers.MemoryHandler(99, target=logging.FileHandler({str(said)!r}))
last.emit(logging.makeLogRecord({{"msg": "kept", "levelno": 1}}))
class Fails(logging.Handler):
    def flush(self): {flush}
logging.getLogger().addHandler(failing := Fails())
"""
    plant(site, handlers)
    check_listed(("aaa", "reference"))
    assert said.read_text() == "kept\n"


@pytest.mark.parametrize("notes", ["__notes__ = 5", "__notes__ = property(lambda self: 1 / 0)", "add_note = 3"])
def test_an_interrupt_whose_notes_are_odd_is_one(site, notes):
    plant(site, f"class Odd(KeyboardInterrupt): {notes}\nraise Odd")
    done = command("list")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("attncore: error: interrupted")
    assert done.stderr.count("\n") == 1


AT_EXIT = {
    "ends the process": "os._exit(7)",
    "fails": "1/0",
    "exits": "raise SystemExit(9)",
    "says something": "print('said')",
}


@pytest.mark.parametrize("end", AT_EXIT)
def test_what_a_plugin_does_at_the_exit_changes_no_end(site, tmp_path, end):
    """It is called, for libraries clean up there."""
    mark = tmp_path / "called"
    source = f"""
import atexit, os, pathlib
@atexit.register
def at_exit():
    pathlib.Path({str(mark)!r}).touch()
    {AT_EXIT[end]}
def not_called():
    pathlib.Path({str(tmp_path / "not called")!r}).touch()
atexit.register(not_called)
atexit.unregister(not_called)
"""
    plant(site, source)
    site.plugin("good")
    done = command("list")
    assert (done.returncode, done.stderr) == (0, "said\n" if end == "says something" else "")
    assert "said" not in done.stdout
    assert mark.exists()
    assert not (tmp_path / "not called").exists()


def test_a_function_that_cannot_be_called_is_refused_as_before(site):
    plant(site, "import atexit; atexit.register(3)")
    (found,) = [one for one in attncore.backends() if one.name == "aaa"]
    assert "TypeError" in str(found.reasons[0])


BUSY = """
import sys, threading
def turn():
    while True: pass
threading.Thread(target=turn, daemon=True).start()
sys.setswitchinterval(100)
"""


def test_a_thread_that_takes_long_turns_holds_no_command_up(site):
    site.plugin("aaa", SPEC.format(name="aaa", module="attn_aaa", extra="") + BUSY)
    check_listed(("aaa", "reference"))


def test_a_limit_of_descriptors_does_not_reach_the_command(site):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, {hard}))"
    site.plugin("aaa", SPEC.format(name="aaa", module="attn_aaa", extra="") + limit)
    site.plugin("good")
    check_listed()


def test_a_limit_that_is_lowered_for_good_leaves_what_it_may(site):
    """Root raises it again."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    plant(site, "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 200))")
    program = "import attncore, resource; attncore.backends(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout in (f"({min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)}, {hard})\n", "(200, 200)\n")


ENDS_IMPORTS = """
import sys
import torch
import attncore
@attncore.hookimpl
def attncore_backend():
    class Ends:
        def find_spec(self, *given, **named): raise SystemExit(0)
        find_distributions = find_spec
    sys.meta_path.insert(0, Ends())
    return attncore.BackendSpec(name="aaa", api=1, factory="attn_aaa_heavy:Backend", devices={"any": 5})
"""


def test_a_finder_that_ends_every_import_ends_its_plugin_alone(site):
    """What a plugin leaves is taken back by modules that may be imported for it."""
    site.plugin("aaa", ENDS_IMPORTS)
    site.plugin("good")
    done = command("list", "--json")
    assert done.returncode == 0
    states = {row["name"]: row["state"] for row in json.loads(done.stdout)}
    assert (states["good"], states["reference"]) == ("loaded", "loaded")
