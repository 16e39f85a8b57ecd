"""What may load is settled before anything is imported."""

import os
import sys

import pytest
from planting import SPEC

from attncore.cli import main
from attncore.errors import PluginError
from attncore.installed_metadata import installed_version
from attncore.registry.plugins import discover, load
from attncore.versions import version_of


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


def test_a_misspelt_name_in_the_variable_is_told_where_it_is_missed(site, monkeypatch):
    site.plugin("flash")
    monkeypatch.setenv("ATTNCORE_PLUGINS", "flsh,reference")
    record = next(record for record in load.registry().records if record.name == "flash")
    assert str(record.reasons[0]).endswith("no backend is named 'flsh'; write flash there")


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


def test_a_distribution_that_another_of_its_name_hides_is_a_row(site, tmp_path, monkeypatch):
    site.plugin("one.", distribution="attn-one")
    hidden = tmp_path / "hidden" / "attn_one-3.0.dist-info"
    hidden.mkdir(parents=True)
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-one\nVersion: 3.0\n")
    (hidden / "entry_points.txt").write_text("[attncore.backends]\none = attn_one\none. = attn_one\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(hidden.parent)])
    found = {(one.name, one.version): one for one in load.registry().records if one.distribution == "attn-one"}
    assert {key: one.state for key, one in found.items()} == {("one.", "1.0"): "loaded", ("one", "3.0"): "duplicate"}
    reason = found["one", "3.0"].reasons[0].message
    assert f"attn-one 3.0 in {hidden.parent} is hidden by attn-one 1.0 in {tmp_path}" in reason


def entry_points(info, text):
    (info / "entry_points.txt").write_bytes(b"[attncore.backends]\n" + text)
    load.forget()


def beside(info, name, distribution="Attn_One", version="2.0"):
    """Another metadata folder in the folder of ``info``."""
    other = info.with_name(name)
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    entry_points(other, b"one = attn_two\n")


def test_two_copies_of_a_distribution_in_one_folder_are_refused(site, monkeypatch):
    info = site.plugin("one")
    beside(info, "Attn.One-2.0.dist-info")
    found = [record for record in load.registry().records if record.name == "one"]
    assert [(record.version, record.state) for record in found] == [("2.0", "duplicate"), ("1.0", "duplicate")]
    for record in found:
        assert "is installed 2 times in" in record.reasons[0].message
        assert "attn-one 1.0" in record.reasons[0].message
        assert "Attn_One 2.0" in record.reasons[0].message
    assert "attn_one" not in sys.modules
    monkeypatch.setenv("ATTNCORE_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="is installed 2 times"):
        load.registry()


@pytest.mark.parametrize("name", ["one", "reference", "flash"])
def test_one_distribution_that_gives_a_name_to_two_modules_is_refused(site, name):
    owner = {"one": "attn-one", "reference": "zoo-thief", "flash": "attn-flash"}[name]
    info = site.plugin(name, distribution=owner)
    entry_points(info, f"{name} = attn_a\n{name} = attn_b\n".encode())
    found = [record for record in load.registry().records if record.distribution == owner]
    assert [record.state for record in found] == ["duplicate", "duplicate"]
    text = "belongs to attncore" if name == "reference" else f"gives the name {name!r} to more than one module"
    assert all(text in record.reasons[0].message for record in found)
    assert "loaded" in {record.state for record in load.registry().records if record.name == "reference"}


def test_the_same_line_twice_is_one_entry_point(site):
    entry_points(site.plugin("one"), b"one = attn_one\none = attn_one\n")
    assert [record.state for record in load.registry().records if record.name == "one"] == ["loaded"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"one = \n", "names no module: ''"),
        (b"one = 1 + 1\n", "names no module: '1 + 1'"),
        (b"one = attn_one; import os\n", "names no module"),
        (b"one = " + b"x" * 1_000_000 + b"!\n", "names no module"),
        (b"o\x1b[31mne = attn_one\n", "entry point 'o\\\\x1b[31mne' of"),
        (b"x" * 1_000_000 + b" = attn_one\n", "(1000000 letters)' of attn-one 1.0 is not a backend's name"),
        ("one\u202e = attn_one\n".encode(), "'one\\\\u202e' of"),
    ],
    ids=["empty", "sum", "statement", "long", "escape", "long name", "turned"],
)
def test_a_malformed_entry_point_is_a_row(site, capsys, line, message):
    entry_points(site.plugin("one"), line)
    site.plugin("two")
    record = next(record for record in load.registry().records if record.distribution == "attn-one")
    assert (record.state, record.spec) == ("broken", None)
    assert message in record.reasons[0].message
    assert states()["two"] == "loaded"
    for words in (["list"], ["list", "--json"], ["explain"], ["explain", "--json"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert len(out) < 20_000
        assert all(letter.isprintable() or letter == "\n" for letter in out)


@pytest.mark.parametrize(
    "metadata",
    [
        b"Name: attn-\xff\nVersion: 1\n",
        b"Name: attn-\x1b[31m\nVersion: \x9b\n",
        b"Version: \x1b[2J\n",
        b"",
        b"N" * 10**6,
    ],
    ids=["not UTF-8", "escapes", "no name", "empty", "long"],
)
def test_malformed_metadata_hides_nothing(site, capsys, metadata):
    info = site.plugin("one")
    (info / "METADATA").write_bytes(metadata)
    site.plugin("two")
    assert states()["two"] == "loaded"
    assert main(["list", "--json"]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def test_many_claims_of_one_name_are_told_briefly(site):
    entry_points(site.plugin("one"), b"".join(b"one = attn_%d\n" % number for number in range(64)))
    found = [record for record in load.registry().records if record.name == "one"]
    assert {record.state for record in found} == {"duplicate"}
    assert max(len(record.reasons[0].message) for record in found) < 1000


def test_entry_points_without_end_are_refused_before_any_is_loaded(site):
    source = SPEC.format(name="one", module="attn_one", extra="")
    entry_points(site.plugin("one", source), b"".join(b"one%d = attn_one\n" % number for number in range(6000)))
    found = [record for record in load.registry().records if record.distribution == "attn-one"]
    assert (len(found), {record.state for record in found}) == (64, {"broken"})
    assert "6000 entry points of attncore.backends; at most 64 are taken" in found[0].reasons[0].message
    assert "attn_one" not in sys.modules


def test_specs_are_loaded_once(site):
    counter = "import builtins\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\n"
    site.module("attn_counting", counter)
    site.plugin("counting", counter + "raise RuntimeError", module="attn_counting")
    import builtins

    load.registry()
    load.registry()
    assert builtins.loads == 1
    del builtins.loads


@pytest.mark.parametrize("called", ["attncore", "AttnCore"])
@pytest.mark.parametrize(
    "lines",
    [b"evil = attn_thief\n", b"reference = attn_thief\n", b"reference = attncore.reference\nevil = attn_thief\n"],
)
def test_a_distribution_that_takes_our_name_does_not_hide_the_reference(site, called, lines):
    info = site.plugin("evil", distribution="attn-thief")
    entry_points(info, lines)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {called}\nVersion: 9.9\n")
    records = load.registry().records
    assert [one.name for one in records if one.state == "loaded"] == ["reference"]
    thieves = [one for one in records if one.version == "9.9"]
    assert len(thieves) == lines.count(b"\n")
    assert all(one.state == "duplicate" and f"remove {info}" in str(one.reasons[0]) for one in thieves)
    assert "attn_thief" not in sys.modules


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a long one"])
@pytest.mark.parametrize("name", ["entry_points.txt", "METADATA", "PKG-INFO"])
def test_a_file_of_metadata_without_an_end_is_not_read(site, name, kind):
    info = site.plugin("endless", extra="requires=('attn-endless>=1',)")
    site.plugin("good")
    if name == "PKG-INFO":
        (info / "METADATA").unlink()
    file = info / name
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as long:
            long.truncate(1 << 40)
    found = {record.name: record for record in load.registry().records}
    assert found["good"].state == "loaded"
    assert ("endless" in found) is (name != "entry_points.txt")
    if name != "entry_points.txt":
        assert (found["endless"].label, found["endless"].state) == ("attn_endless", "loaded")
        assert "attn-endless" not in load.registry().packages
        assert version_of("attn-endless") is None


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a long one"])
def test_metadata_that_is_one_file_without_an_end_is_not_read(site, tmp_path, kind):
    site.plugin("good", extra="requires=('endless>=1',)")
    file = tmp_path / "endless-1.0-py3.11.egg-info"
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as long:
            long.truncate(1 << 40)
    found = {record.name: record for record in load.registry().records}
    assert found["good"].state == "loaded"
    assert "endless" not in load.registry().packages
    with pytest.raises(OSError, match=r"endless-1\.0-py3\.11\.egg-info (is no regular file|has more than)"):
        installed_version("endless")


def test_metadata_that_is_one_file_is_read(site, tmp_path):
    site.plugin("good", extra="requires=('whole>=1',)")
    (tmp_path / "whole-1.5-py3.11.egg-info").write_text("Metadata-Version: 1.2\nName: whole\nVersion: 1.5\n")
    assert load.registry().packages["whole"] == "1.5"
