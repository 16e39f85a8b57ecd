"""benchmarks/decode_kernels.py measures what it says: tried on a CPU, tiny."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("decode_kernels")


def test_kernels_are_measured_and_what_cannot_run_says_why(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "machine", dict)
    saved = tmp_path / "found.json"
    script.main(["--device", "cpu", "--tiny", "--save", str(saved)])
    rows = json.loads(saved.read_text())["decodes"]
    assert [(row["rows"], row["context"]) for row in rows] == [(1, 20), (2, 20)]
    for row in rows:
        assert row["us"].keys() == {"reference, auto", "reference, fp8_e4m3"}
        assert min(row["us"].values()) > 0
        assert not row["refused"]
    with_sinks = script.measured(script.arguments(["--device", "cpu", "--tiny", "--sinks", "--dtypes", "auto"]), 2, 20)
    assert with_sinks["us"].keys() == {"reference, auto", "reference, auto, sinks"}
    args = script.arguments(["--device", "cpu", "--kernels", "flash"])
    found = script.measured(args, 1, 20)
    assert not found["us"]
    assert found["refused"].keys() == {"flash, auto", "flash, fp8_e4m3"}
    assert all(found["refused"].values())
