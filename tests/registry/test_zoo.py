"""A zoo of bad plugins: each is a row with a reason, and none stops another."""

import importlib.metadata
import sys
import zipfile
from types import SimpleNamespace

import pytest
from planting import SPEC, zoo

import attncore
from attncore.registry.plugins import load


def rows():
    return {(record.name, record.distribution): record for record in load.registry().records}


def test_every_bad_plugin_is_a_row_and_the_good_one_works(site):
    expected = zoo(site)
    found = rows()
    for (name, _), record in found.items():
        if name in expected:
            state, text = expected[name]
            assert (record.state, record.spec) == (state, None), name
            assert text in str(record.reasons[0]), name
            assert record.reasons[0].code == state
            assert record.reasons[0].fix
    assert {name for name, _ in found} == {*expected, "good", "reference"}
    assert found["good", "zoo-good"].state == "loaded"
    choice = attncore.select(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32")
    assert choice.name == "good"


def test_rows_are_sorted_by_name_and_distribution(site):
    zoo(site)
    keys = [(record.name, record.distribution) for record in load.registry().records]
    assert keys == sorted(keys)


def test_nonsense_lists_every_field_at_once(site):
    zoo(site)
    text = str(rows()["nonsense", "zoo-nonsense"].reasons[0])
    assert "head_sizes: -64" in text
    assert "devices: 'tpu:v5' is no device" in text


def test_a_later_contract_is_told_before_its_unknown_fields(site):
    zoo(site)
    reason = rows()["later", "zoo-later"].reasons[0]
    assert (reason.asked, reason.accepted) == (2, 1)
    assert str(reason).endswith("install zoo-later<1")
    assert str(rows()["earlier", "zoo-earlier"].reasons[0]).endswith("install zoo-earlier>1")


def test_a_name_claimed_twice_is_refused(site):
    zoo(site)
    found = rows()
    for distribution, other in (("zoo-taken-a", "zoo-taken-b"), ("zoo-taken-b", "zoo-taken-a")):
        record = found["taken", distribution]
        assert record.state == "duplicate"
        assert other in record.reasons[0].message
    assert "zoo_taken_a" not in sys.modules


def test_a_known_name_stays_with_its_distribution(site):
    zoo(site)
    found = rows()
    assert found["reference", "attncore"].state == "loaded"
    thief = found["reference", "zoo-thief"]
    assert thief.state == "duplicate"
    assert "belongs to attncore" in thief.reasons[0].message
    assert "zoo_thief" not in sys.modules


def test_a_plugin_that_imports_torch_for_its_spec_works_and_is_told(site, monkeypatch):
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    site.module("numba", "")
    site.plugin("heavy", "import numba\n" + SPEC.format(name="heavy", module="heavy", extra=""))
    record = rows()["heavy", "attn-heavy"]
    assert (record.state, record.reasons[0].code) == ("loaded", "heavy_import")
    assert "imports numba" in record.reasons[0].message
    choice = attncore.select(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32", backend="heavy")
    assert "imports numba" in choice.explain()


def test_strict_raises_with_the_cause_chained(site, monkeypatch):
    site.plugin("raises", "raise RuntimeError('no licence file')")
    monkeypatch.setenv("ATTNCORE_STRICT_PLUGINS", "1")
    with pytest.raises(attncore.PluginError, match=r"raises \(attn-raises 1.0\).*no licence file") as caught:
        load.registry()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_ctrl_c_passes_through(site):
    site.plugin("waits", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load.registry()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"[attncore.backends]\nmangled = \xff\xfe\n", "mangled"),
        (b"[attncore.backends]\nmangled = attn_mangled\nno equals sign\n", "mangled"),
        (b"[attncore.backends]\nno equals sign\n", "?"),
    ],
)
def test_unreadable_entry_points_are_broken_and_hide_nothing_else(site, content, name):
    info = site.plugin("mangled")
    (info / "entry_points.txt").write_bytes(content)
    site.plugin("fine")
    load.forget()
    assert rows()["fine", "attn-fine"].state == "loaded"
    record = rows()[name, "attn-mangled"]
    assert (record.state, record.version) == ("broken", "1.0")
    assert "entry_points.txt of attn-mangled 1.0 cannot be read" in record.reasons[0].message
    assert attncore.select(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32").name == "fine"


def test_unreadable_entry_points_of_others_are_skipped(site, caplog):
    info = site.plugin("mangled")
    (info / "entry_points.txt").write_bytes(b"[console_scripts]\nmangled = \xff\xfe\n")
    load.forget()
    assert ("mangled", "attn-mangled") not in rows()
    assert "metadata is unreadable" in caplog.text


def test_entry_points_in_a_damaged_zip_file_hide_nothing(site, tmp_path, monkeypatch, caplog):
    file = tmp_path / "damaged.zip"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("attn_damaged-1.0.dist-info/METADATA", "Name: attn-damaged\nVersion: 1.0\n")
        packed.writestr("attn_damaged-1.0.dist-info/entry_points.txt", "[attncore.backends]\ndamaged = attn_damaged\n")
    file.write_bytes(file.read_bytes().replace(b"damaged = ", b"changed = "))  # its checksum stays
    monkeypatch.setattr(sys, "path", [str(file), *sys.path])
    site.plugin("fine")
    assert rows()["fine", "attn-fine"].state == "loaded"
    assert "attn-damaged is skipped, its metadata is unreadable: BadZipFile" in caplog.text


@pytest.mark.parametrize("point", [("mangled", None), ("mangled", b"attn_mangled"), (5, "attn_mangled")])
def test_entry_points_of_a_finder_that_are_no_text_hide_nothing(site, monkeypatch, point):
    class Odd(importlib.metadata.Distribution):
        _path = property(lambda self: 1 / 0)
        entry_points = (importlib.metadata.EntryPoint(*point, "attncore.backends"),)

        def read_text(self, filename):
            return "[attncore.backends]"

        def locate_file(self, path):
            return path

    finder = SimpleNamespace(find_spec=lambda *_: None, find_distributions=lambda context: [Odd()])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    site.plugin("fine")
    assert rows()["fine", "attn-fine"].state == "loaded"


def test_a_distribution_without_metadata_still_has_a_name(site):
    info = site.plugin("bare")
    (info / "METADATA").unlink()
    load.forget()
    assert rows()["bare", "attn_bare"].state == "loaded"


def test_an_entry_point_that_is_no_name_is_broken(site):
    site.plugin("Bad Name", distribution="zoo-name", module="zoo_name")
    record = rows()["Bad Name", "zoo-name"]
    assert record.state == "broken"
    assert "not a backend's name" in record.reasons[0].message
