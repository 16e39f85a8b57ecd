"""What a plugin does to the settings of the process while it loads reaches neither the other plugins nor the caller."""

import contextlib
import cProfile
import itertools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from planting import SPEC
from process_changes import ASKED, CHANGES, settings

import attncore
from attncore.registry.child_process import run_in_fork
from attncore.registry.plugins import discover, load


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plugin_does_to_the_process_does_not_reach_the_others(site, change, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("ATTNCORE_KERNELS", "cython")
    warn = "import warnings; warnings.warn('old', stacklevel=1)\n"
    monkeypatch.setattr(warnings, "filters", [("ignore", None, Warning, None, 0)])
    site.plugin("aaa", CHANGES[change] + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    site.plugin("good", warn + SPEC.format(name="good", module="attn_good", extra=""))
    before, limit, filters = settings(), sys.getrecursionlimit(), warnings.filters
    try:
        records = {record.name: record.state for record in load.registry().records}
        after = settings()
    finally:
        sys.setrecursionlimit(limit)  # what failed is told by this process
        warnings.filters = filters
    assert (records["aaa"], records["good"]) == ("loaded", "loaded")
    assert after == before
    assert load.registry() is load.registry()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "more")])  # the plugins are found anew
    assert [attncore.select(**ASKED).name for _ in range(2)] == ["aaa", "aaa"]


WORKS = """
import importlib.abc, sys
class Works(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None): return None
sys.meta_path.insert(0, Works())
"""


def test_a_finder_that_works_stays_behind_those_of_before(site, monkeypatch, caplog):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = [*sys.meta_path]
    failing = CHANGES["a finder of an old signature"]
    site.plugin("aaa", WORKS + failing + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    load.registry()
    assert sys.meta_path[:-1] == before
    assert type(sys.meta_path[-1]).__name__ == "Works"
    assert "attn-aaa 1.0 adds Old to sys.meta_path, which is taken out again, because it fails: Type" in caplog.text


def test_a_finder_that_was_there_and_fails_hides_no_distribution(site, monkeypatch, caplog):
    class Fails:
        def find_spec(self, name, path, target=None):
            return None

        def find_distributions(self, context):
            raise RuntimeError("no index")

    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])
    site.plugin("good")
    assert "good" in {record.name for record in discover.find()}
    assert "distributions of Fails in sys.meta_path cannot be listed: RuntimeError: no index" in caplog.text


SLOW = """
import os, sys, time
sys.path.insert(0, "/of-the-plugin")
sys.stdout = None
os.chdir("/")
os.environ["ATTNCORE_STRICT_PLUGINS"] = "x"
os.environ["PYTHONHASHSEED"] = "abc"  # with which no child of Python starts
time.sleep(0.3)
"""


def test_threads_that_load_at_once_load_once_and_leave_the_process_as_it_was(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site.plugin("aaa", SLOW + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    before = settings()
    with ThreadPoolExecutor(3) as pool:
        found = [time.sleep(0.05) or pool.submit(load.registry) for _ in range(3)]
        registries = [one.result() for one in found]
    assert registries[0] is registries[1] is registries[2]
    assert settings() == before


def searches(number):
    """As imports do that find new folders."""
    sys.path_importer_cache[f"/absent/{number}"] = None
    for old in range(number - 50, number) if number % 50 == 0 else ():
        sys.path_importer_cache.pop(f"/absent/{old}", None)


def sets_variables(number):
    with contextlib.suppress(KeyError):  # it is put back meanwhile
        os.environ[f"PYTHONACME{number % 300}"] = "1"
        del os.environ[f"PYTHONACME{(number + 150) % 300}"]


@pytest.mark.parametrize("change", [searches, sets_variables])
def test_what_another_thread_changes_meanwhile_breaks_no_plugin(site, monkeypatch, change):
    monkeypatch.setattr(sys, "path_importer_cache", dict(sys.path_importer_cache))
    ended = threading.Event()

    def changes():
        for number in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            change(number)

    turns = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool:
        try:
            sys.setswitchinterval(1e-5)
            changed = pool.submit(changes)
            for _ in range(40):
                load.forget()
                states = {one.name: one.state for one in attncore.backends()}
                assert states["reference"] == "loaded"
        finally:
            sys.setswitchinterval(turns)
            ended.set()
    changed.result()
    for name in [name for name in os.environ if name.startswith("PYTHONACME")]:
        del os.environ[name]


def test_filters_of_warnings_that_another_thread_has_for_a_moment_do_not_stay(site, monkeypatch):
    """It is within ``catch_warnings``, as while it imports torch, when a plugin is loaded, and leaves it meanwhile."""
    steps = [threading.Event() for _ in range(3)]
    monkeypatch.setattr(attncore, "tests_events", steps, raising=False)
    source = "import attncore; attncore.tests_events[1].set(); attncore.tests_events[2].wait(30)\n"
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    before = warnings.filters, [*warnings.filters]

    def catches():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps[0].set()
            assert steps[1].wait(30)
        steps[2].set()

    with ThreadPoolExecutor(1) as pool:
        caught = pool.submit(catches)
        assert steps[0].wait(30)
        load.registry()
        caught.result(30)
    assert warnings.filters is before[0]
    assert warnings.filters == before[1]


def test_a_child_that_is_forked_while_plugins_load_can_load_them(site, tmp_path):
    """The thread that loads is not in the child, and does not end there."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    waits = f"""
import pathlib, time
pathlib.Path({str(started)!r}).touch()
end = time.monotonic() + 30
while not pathlib.Path({str(ended)!r}).exists() and time.monotonic() < end: time.sleep(0.01)
"""
    site.plugin("aaa", waits + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load.registry)
        while not started.exists():
            time.sleep(0.01)
        with mock.patch.dict(os.environ, {"ATTNCORE_PLUGINS": "reference"}):
            told, error = run_in_fork(lambda: " ".join(one.state for one in load.registry().records), 20, 1 << 30)
        ended.touch()
        assert loaded.result().records
    assert (told, error) == ("blocked loaded", "")


def test_signals_and_timers_are_as_before(site):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    source = f"{CHANGES['ignores signals']}; {CHANGES['a timer']}\n"
    site.plugin("acme", source + SPEC.format(name="acme", module="attn_acme", extra=""))
    assert "acme" in [one.name for one in attncore.backends()]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_function_that_traces_is_taken_away(site):
    before = sys.gettrace()
    site.plugin("acme", CHANGES["traces"] + "\n" + SPEC.format(name="acme", module="attn_acme", extra=""))
    try:
        assert "acme" in [one.name for one in attncore.backends()]
        found = sys.gettrace()
    finally:
        sys.settrace(before)
    assert found is before


@pytest.mark.parametrize("does", ["", "import sys; sys.setprofile(None)", "import sys; sys.setprofile(lambda *_: 0)"])
def test_a_profile_goes_on_behind_plugins_that_load(site, does):
    site.plugin("good", f"{does}\n" + SPEC.format(name="good", module="attn_good", extra=""))
    before, profile = sys.getprofile(), cProfile.Profile()
    sys.setprofile(None)
    try:
        profile.enable()
        load.registry()
        sum(range(3))
        profile.disable()
    finally:
        sys.setprofile(before)
    assert any("sum" in str(entry.code) for entry in profile.getstats())


def test_a_logging_handler_that_raises_stops_no_other_plugin(site, monkeypatch):
    source = """
import logging
class Raises(logging.Handler):
    def handle(self, record): raise ValueError("mine")
logging.getLogger("attncore").addHandler(Raises())
logging.getLogger("attncore").setLevel(logging.DEBUG)
"""

    class Fails:
        def find_spec(self, name, path, target=None):
            return None

        def find_distributions(self, context):
            raise RuntimeError("no index")

    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])  # which is a warning each time
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    site.plugin("bbb", "raise RuntimeError('broken')")
    logger = logging.getLogger("attncore")
    before, level = list(logger.handlers), logger.level
    try:
        states = {one.name: one.state for one in attncore.backends()}
        load.forget()
        chosen = attncore.select(**ASKED).name
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
    assert (states["aaa"], states["bbb"], chosen) == ("loaded", "broken", "aaa")


def test_a_line_of_the_log_has_the_place_that_it_is_of(site, caplog):
    caplog.set_level(logging.INFO, "attncore")
    attncore.select(**ASKED)
    assert [one.module for one in caplog.records if " because " in one.message] == ["select"]
