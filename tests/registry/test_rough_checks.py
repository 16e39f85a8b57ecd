"""What a plugin's check of a request does to the process reaches neither the other plugins nor the caller."""

import os
import signal
import sys
import warnings

import pytest
from planting import SPEC
from process_changes import ASKED, CHANGES, settings

import attncore

CHECKED = """
import os, signal, sys
CHANGE = {change!r}

{check}
"""
PLACES = {
    "in the call": "def check(request, host): exec(CHANGE, {})",
    "in a generator": """
def check(request, host):
    exec(CHANGE, {})
    yield from ()""",
    "when the generator is closed": """
def check(request, host):
    try:
        while True: yield "no"
    finally:
        exec(CHANGE, {})""",
    "in an iterator": """
class Answers:
    def __iter__(self): return self
    def __next__(self):
        exec(CHANGE, {})
        raise StopIteration
def check(request, host): return Answers()""",
    "in the text of an error": """
class Wrong(Exception):
    def __str__(self):
        exec(CHANGE, {})
        return "wrong"
def check(request, host): raise Wrong""",
    "in a property of an answer": """
import attncore
class Mine(attncore.Reason):
    @property
    def message(self):
        exec(CHANGE, {})
        return "mine"
    def __init__(self): pass
    code = "check"; asked = accepted = None; source = fix = ""
def check(request, host): return [Mine()]""",
    "when the answers go away": """
class Answers(list):
    def __del__(self): exec(CHANGE, {})
def check(request, host): return Answers()""",
}


def plant(site, check, change=""):
    source = CHECKED.format(change=change, check=check)
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=" check=check,"))
    site.plugin("good")


@pytest.mark.parametrize(
    "change", ["another folder", "a list on the path", "ignores signals", "forks", "another stdout"]
)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_check_does_to_the_process_does_not_reach_the_caller(site, change, place):
    plant(site, PLACES[place], CHANGES[change])
    attncore.backends()
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    before, folder = settings(), os.getcwd()
    try:
        found = attncore.select(**ASKED, exclude=["reference"]).name
        after, left = settings(), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    finally:
        os.chdir(folder)
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
    assert found in ("aaa", "good")
    assert after == before
    assert left == handlers


def test_answers_without_end_that_swallow_their_end_are_a_reason(site, capfd):
    check = """
def check(request, host):
    while True:
        try:
            yield "no"
        except GeneratorExit:
            sys.path.append("/of-the-plugin")
"""
    plant(site, check)
    choice = attncore.select(**ASKED, prefer=["good"])
    assert choice.name == "good"
    assert "generator ignored GeneratorExit" in str(choice.reasons["aaa"][-1])
    assert "/of-the-plugin" not in sys.path
    assert capfd.readouterr().err == ""


def test_a_handler_of_a_check_that_raises_is_a_reason(site):
    check = """
def raises(*_): raise ValueError("late")
def check(request, host):
    signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, 2e-5)
"""
    plant(site, check)
    for _ in range(20):
        assert attncore.select(**ASKED, prefer=["good"]).name == "good"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_the_filters_of_warnings_are_as_before(site):
    plant(site, "def check(request, host): exec(CHANGE, {})", CHANGES["warnings are errors"])
    attncore.backends()
    filters, before = warnings.filters, [*warnings.filters]
    attncore.select(**ASKED)
    assert warnings.filters is filters
    assert [*filters] == before
