"""What attncore itself requires and is not there: the user is told what to install, whoever misses it first."""

import json
import sys

import pytest

from attncore.cli import main
from attncore.registry.plugins import load


@pytest.fixture
def without(monkeypatch):
    """A function that makes a library one that cannot be found."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_without_pluggy_no_plugin_is_to_blame(site, without):
    site.plugin("good")
    without("pluggy")
    for record in load.registry().records:
        (reason,) = record.reasons
        assert (record.state, reason.source) == ("broken", "attncore 0.1.0")
        assert str(reason) == (
            "pluggy is not installed, by which attncore calls the hooks of plugins; pip install 'pluggy>=1.5'"
        )


def test_a_plugin_that_misses_its_own_library_is_to_blame(site):
    site.plugin("bad", "import a_library_that_is_not_there")
    (record,) = [one for one in load.registry().records if one.name == "bad"]
    assert "report it to its authors" in record.reasons[0].fix


def test_the_doctor_without_pluggy(site, capsys):
    absent = "raise ModuleNotFoundError('none', name='pluggy')"
    (site.folder / "pluggy.py").write_text(absent)  # for the child processes
    site.plugin("good")
    assert main(["doctor", "--json", "--no-create"]) == 1
    found = {row["name"]: row["reasons"][0] for row in json.loads(capsys.readouterr().out)["backends"]}
    assert found.keys() >= {"good", "reference"}
    assert all(reason["message"].startswith("pluggy is not installed, ") for reason in found.values())


@pytest.mark.parametrize("words", [["--metadata-only"], []])
def test_replay_without_rich_says_so_before_it_runs(site, without, capsys, monkeypatch, words):
    without("rich")
    monkeypatch.setattr("attncore.cli.replay.replay", lambda *given, **named: pytest.fail("it runs"))
    assert main(["replay", "--requests", "1", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("attncore: error: ")) == ("", True)
    assert err.endswith("rich is not installed: pip install 'rich>=13'\n")
