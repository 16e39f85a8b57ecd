"""benchmarks/slot_mapping.py measures what it says: tried with few turns."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("slot_mapping")


def test_the_medians_of_each_length_are_saved(script, tmp_path, capsys):
    saved = tmp_path / "found.json"
    script.main(["--turns", "2", "--json", str(saved)])
    found = json.loads(saved.read_text())
    assert found["turns"] == 2
    assert list(found["us"]) == ["list", "int32", "profiling run"]
    for kind, row in found["us"].items():
        names = ["bare loop", "loop", "compute_slot_mapping"][kind == "profiling run" :]
        assert {tokens: list(us) for tokens, us in row.items()} == dict.fromkeys(("1", "2", "16", "512", "8192"), names)
    assert "list, 8192 tokens" in capsys.readouterr().out


def test_slots_that_differ_are_no_result(script, monkeypatch):
    monkeypatch.setattr(script, "compute_slot_mapping", lambda profile, slots, *others: slots.append(3))
    with pytest.raises(RuntimeError, match="1 tokens: the slots differ"):
        script.microseconds(1, 1)
