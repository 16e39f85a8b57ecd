"""The benchmarks of floors run, and say what they promise: tried on a CPU."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")


@pytest.fixture
def benchmark_named(monkeypatch):
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / folder))
    monkeypatch.delitem(sys.modules, "run", raising=False)  # examples have one, too
    return pytest.importorskip


def test_launches_beside_bare_ones(benchmark_named, tmp_path):
    saved = tmp_path / "found.json"
    words = ["--device", "cpu", "--rounds", "2", "--rows", "3", "--nodes", "1", "--save", str(saved)]
    assert benchmark_named("launch_floor").main(words) == 0
    times = json.loads(saved.read_text())["rows"][0]["us_a_step"]
    assert {"bare, 8 replays", "bare, one graph of 8", "ahead, 8 replays", "ahead, one graph of 8"} <= times.keys()
    assert times["ahead, 8 replays"]["median"] > times["bare, 8 replays"]["median"] > 0


def test_a_loop_without_attncore_beside_ours(benchmark_named, tmp_path):
    saved = tmp_path / "found.json"
    words = ["--device", "cpu", "--rows", "3", "--steps", "3", "--context", "300", "--device-ms", "0.1"]
    assert benchmark_named("tail_floor").main([*words, "--save", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [row["frozen"] for row in rows] == [False, True]
    for row in rows:
        assert row["attncore"]["median"] > 0
        assert row["bare: arrays and spin"]["median"] > 0
        assert {"build", "replay", "launch"} <= row["parts"].keys()


def test_list_beside_what_no_command_can_leave_out(benchmark_named, tmp_path, capsys):
    saved = tmp_path / "found.json"
    assert benchmark_named("list_floor").main(["--rounds", "2", "--save", str(saved)]) == 0
    found = json.loads(saved.read_text())["processes"]
    assert list(found) == ["bare Python", "floor", "attncore --help", "attncore list"]
    assert found["attncore list"]["processor_ms"]["median"] > found["bare Python"]["processor_ms"]["median"] > 0
    assert "load of the machine" in capsys.readouterr().out


def test_what_a_sanitizer_would_check_is_right(benchmark_named, monkeypatch, capsys):
    nodes = benchmark_named("sanitized_nodes")
    monkeypatch.setattr(nodes, "plans", lambda count, device: {"plans": 0, "wrong": 0})  # compiled for a device
    assert nodes.work(20, "cpu") == 0
    monkeypatch.setattr(nodes, "sanitizer", lambda: None)
    assert nodes.main([]) == 3
    assert "compute-sanitizer is not on this machine" in capsys.readouterr().out
