"""What may load is settled before anything is imported."""

import sys

import pytest

from attncore.registry.plugins import discover, load


def states():
    return {record.name: record.state for record in load.registry().records}


@pytest.mark.parametrize(
    ("variable", "value", "loaded"),
    [
        ("ATTNCORE_PLUGINS", "one", {"one"}),
        ("ATTNCORE_PLUGINS", " one , reference ", {"one", "reference"}),
        ("ATTNCORE_PLUGINS", "", set()),
        ("ATTNCORE_DISABLE_PLUGINS", "one", {"two", "reference"}),
        ("ATTNCORE_DISABLE_PLUGINS", "", {"one", "two", "reference"}),
    ],
)
def test_lists_of_names(site, monkeypatch, variable, value, loaded):
    site.plugin("one")
    site.plugin("two")
    monkeypatch.setenv(variable, value)
    found = states()
    assert {name for name, state in found.items() if state == "loaded"} == loaded
    assert {name for name, state in found.items() if state == "blocked"} == {"one", "two", "reference"} - loaded


def test_disabling_wins_over_allowing(site, monkeypatch):
    site.plugin("one")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "one")
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "one")
    assert states()["one"] == "blocked"


def test_a_blocked_plugin_is_not_imported_and_says_how_to_let_it_in(site, monkeypatch):
    site.plugin("one")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "two")
    record = next(record for record in load.registry().records if record.name == "one")
    assert "attn_one" not in sys.modules
    assert str(record.reasons[0]) == "blocked by ATTNCORE_PLUGINS, which allows only: two; add one to ATTNCORE_PLUGINS"


def test_a_blocked_claimant_makes_no_duplicate(site, monkeypatch):
    site.plugin("one")
    site.plugin("flash", distribution="zoo-flash")
    monkeypatch.setenv("ATTNCORE_DISABLE_PLUGINS", "flash")
    assert states() == {"one": "loaded", "flash": "blocked", "reference": "loaded"}


def test_finding_imports_nothing_of_a_plugin(site):
    site.plugin("one")
    assert [record.state for record in discover.find() if record.name == "one"] == ["found"]
    assert "attn_one" not in sys.modules


def test_a_distribution_twice_on_the_path_counts_once(site, tmp_path, monkeypatch):
    site.plugin("one", version="2.0")
    older = tmp_path / "older"
    older.mkdir()
    info = older / "Attn.One-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Attn.One\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attncore.backends]\none = attn_one\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    assert [(record.version, record.state) for record in load.registry().records if record.name == "one"] == [
        ("2.0", "loaded")
    ]


def test_specs_are_loaded_once(site):
    counter = "import builtins\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\n"
    site.module("attn_counting", counter)
    site.plugin("counting", counter + "raise RuntimeError", module="attn_counting")
    import builtins

    load.registry()
    load.registry()
    assert builtins.loads == 1
    del builtins.loads
