"""A plugin that asks for the backends while it is loaded: refused at once, where it would be loaded without end."""

import sys
import threading

import pytest
from planting import SPEC
from process_changes import ASKED

import attncore

HOOK = """
import sys, attncore
sys.path.append("/opt/{name}")
calls = []

{spec}
plain = attncore_backend

@attncore.hookimpl
def attncore_backend():
    calls.append(1)
    {asks}
    return plain()
"""
TRIES = """
    try: attncore.backends()
    except attncore.PluginError as error: told = str(error)"""
REFUSED = "asks for the backends while plugins are loaded, which would load it again and again; ask when a backend is"


def plant(site, name, asks):
    spec = SPEC.format(name=name, module=f"attn_{name}", extra="").replace("@hookimpl", "")
    site.plugin(name, HOOK.format(name=name, spec=spec, asks=asks))


@pytest.mark.parametrize("asks", ["attncore.backends()", f"attncore.select(**{ASKED!r})"])
def test_hooks_that_negotiate_are_rows(site, asks):
    for name in ("one", "two"):
        plant(site, name, asks)
    site.plugin("good")
    found = {one.name: one for one in attncore.backends()}
    assert [found[name].state for name in ("one", "two", "good", "reference")] == ["broken", "broken"] + ["loaded"] * 2
    assert f"PluginError: plugins: attn-one 1.0 {REFUSED}" in str(found["one"].reasons[0])
    assert [len(sys.modules[f"attn_{name}"].calls) for name in ("one", "two")] == [1, 1]


def test_a_hook_that_takes_the_refusal_is_loaded_once(site):
    for name in ("one", "two"):
        plant(site, name, TRIES.strip("\n").replace("told", "sys.modules[__name__].told").lstrip())
    states = {one.name: one.state for one in attncore.backends()}
    assert (states["one"], states["two"]) == ("loaded", "loaded")
    assert REFUSED in sys.modules["attn_two"].told
    assert len(sys.modules["attn_two"].calls) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import attncore; attncore.backends()",
        """
import attncore
class Wrong(Exception):
    def __str__(self): return repr(attncore.registry.plugins.load.registry())
raise Wrong
""",
    ],
    ids=["at import", "in the text of its error"],
)
def test_wherever_it_asks_it_is_a_row(site, source):
    site.plugin("aaa", source)
    site.plugin("good")
    states = {one.name: one.state for one in attncore.backends()}
    assert (states["aaa"], states["good"]) == ("broken", "loaded")


def test_a_finder_of_distributions_that_negotiates_ends_nothing_but_itself(site, monkeypatch, caplog):
    class Asks:
        calls = 0

        def find_spec(self, name, path, target=None):
            return None

        def find_distributions(self, context):
            self.calls += 1
            sys.path.append(f"/opt/{self.calls}")
            attncore.backends()

    asks = Asks()
    monkeypatch.setattr(sys, "meta_path", [asks, *sys.meta_path])
    site.plugin("good")
    assert "good" in [one.name for one in attncore.backends()]
    assert "something in sys.meta_path asks for the backends" in caplog.text
    assert asks.calls < 5


def test_what_was_refused_is_answered_afterwards_and_in_other_threads(site):
    plant(site, "one", "attncore.backends()")
    names = []
    attncore.backends()
    thread = threading.Thread(target=lambda: names.extend(one.name for one in attncore.backends()))
    thread.start()
    thread.join()
    assert "one" in names
    assert attncore.select(**ASKED, exclude=["one"]).name == "reference"
