"""benchmarks/served_step.py measures what it says: tried on a CPU, over nodes that the host runs."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")


@pytest.fixture
def served(monkeypatch):
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / folder))
    if "engine" not in sys.modules:
        monkeypatch.delitem(sys.modules, "run", raising=False)  # benchmarks have one, too
    return pytest.importorskip("served_step")


QUICK = ["--device", "cpu", "--rows", "3", "--steps", "4", "--evict-mib", "0", "--device-ms", "0.1"]


def test_every_kind_of_step_has_its_parts(served, tmp_path, capsys):
    saved = tmp_path / "found.json"
    assert served.main([*QUICK, "--context", "300", "--save", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [row["kind"] for row in rows] == [*served.KINDS]
    for row in rows:
        assert row["transport"] == "graph"
        parts = {"build", "launch", "wait", "schedule", "book", *(["replay"] if row["kind"] != "chunk" else [])}
        assert parts <= row["parts_us"].keys()
        assert row["parts_us"]["wait"]["median"] >= 100 * row["device_ms"] / 0.1
        assert row["wall_over_device"] > 1
        assert row["attncore_us"]["median"] >= row["parts_us"]["build"]["median"]
    assert "come and go, 3 requests" in capsys.readouterr().out


def test_the_engine_over_a_llama_runs_its_kinds(served, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    saved = tmp_path / "found.json"
    assert served.main([*QUICK, "--models", "llama", "--save", str(saved)]) == 0
    kinds = [row["kind"] for row in json.loads(saved.read_text())["rows"]]
    assert kinds == ["decode", "come and go", "chunk"]


def test_a_part_is_without_what_runs_inside_of_it(served):
    parts = served.Parts()
    with parts.part("build"):
        served.time.sleep(0.001)
        with parts.part("plan"):
            served.time.sleep(0.02)
    parts.end_step()
    table = parts.table()
    assert table["plan"]["median"] >= 20_000 > table["build"]["median"] >= 1000
