"""benchmarks/table_reading.py measures what it says: tried with few turns."""

import json
from pathlib import Path

import pytest

pytest.importorskip("attncore._slots", reason="the compiled extension is not installed")
pytest.importorskip("numba")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("table_reading")


def test_the_medians_of_both_kernels_are_saved(script, tmp_path, capsys):
    saved = tmp_path / "found.json"
    script.main(["--turns", "2", "--json", str(saved)])
    found = json.loads(saved.read_text())["us"]
    ways = [f"{kernels}, {kind}" for kernels in ("cython", "numba") for kind in ("lists", "int32", "int64")]
    assert [list(row) for row in found.values()] == [["ids", "copy", *ways]] * 2
    assert "long: ids 7" in capsys.readouterr().out


def test_tables_that_are_not_read_are_no_result(script, monkeypatch):
    monkeypatch.setattr(script.np, "int64", script.np.float64)
    with pytest.raises(RuntimeError, match="cython, int64: not read"):
        script.microseconds((300, 340), 1)
