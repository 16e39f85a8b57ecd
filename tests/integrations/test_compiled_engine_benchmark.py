"""benchmarks/compiled_engine.py measures what it says: tried on a CPU, with a tiny model."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield pytest.importorskip("compiled_engine")
    torch._dynamo.reset()


def test_rows_of_an_engine_with_and_without_compiled_layers(benchmark_module, tmp_path, capsys):
    words = ["--device", "cpu", "--shape", "tiny", "--backends", "reference", "--compiler", "eager"]
    words += ["--prompt", "3", "--new", "3", "--save", str(tmp_path / "found.json")]
    assert benchmark_module.main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["way"] for row in found["rows"]] == ["eager", "unfused", "compiled", "compiled again"]
    assert [row["graphs"] for row in found["rows"]] == [0, 2, 2, 2]
    for row in found["rows"]:
        assert (row["compiled_later"], row["graph_breaks"], row["agrees"]) == (0, 0, 1.0)
        assert row["decode_steps"] == 2
        assert row["decode_us"] * row["decode_steps"] / 1e6 < row["wall_s"]


def test_a_backend_that_does_not_run_is_a_row(benchmark_module, capsys):
    assert benchmark_module.main(["--device", "cpu", "--shape", "tiny", "--backends", "flash"]) == 1
    assert "flash, loads: " in capsys.readouterr().out


def test_faults_are_said(benchmark_module):
    row = {"way": "compiled", "backend": "b", "compiled_later": 0, "graph_breaks": 0, "agrees": 1.0}
    faults = [
        benchmark_module.faults_of([row | one], exact=True) for one in ({}, {"compiled_later": 2}, {"agrees": 0.9})
    ]
    assert [*map(list, faults)] == [[], ["b, compiled: compiled_later 2"], ["b, compiled: tokens differ from eager's"]]
    assert [*benchmark_module.faults_of([row | {"agrees": 0.9}], exact=False)] == []
