"""benchmarks/steps_of_each_backend.py measures what it says: tried on a CPU, tiny."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("steps_of_each_backend")


def test_a_backend_is_measured_and_saved_and_another_says_why_it_is_not_here(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "machine", dict)
    saved = tmp_path / "found.json"
    tiny = ("--device", "cpu", "--tiny", "--rounds", "1", "--only", "prefill of 8192, 1 layer", "--save", str(saved))
    assert not script.main(["--backends", "reference,flash:2", *tiny])
    found = json.loads(saved.read_text())
    assert list(found["not_here"]) == ["flash:2"]
    (row,) = [rows["reference"] for rows in found["cases"].values()]
    assert row["finite"]
    assert row["largest_difference"] == 0
    assert row["done"] >= row["build"] + row["run"] > 0


def test_a_captured_step_is_replayed_through_every_layer(script):
    import gpu_work

    class Impl(gpu_work.Impl):
        calls = 0

        def forward(self, query, key, value, kv_cache, metadata, output=None):
            Impl.calls += 1
            return output.copy_(query)

    class Backend(gpu_work.Backend):
        impl_class = Impl

    case = script.Case("decode of 3", [(7, 1), (20, 1), (33, 1)], 2, graph=True)
    args = SimpleNamespace(device="cpu", rounds=2)
    row = script.measure(case, {"bench": lambda: Backend("cpu")}, args)["bench"]
    assert row["captured"]
    assert row["finite"]
    assert Impl.calls == 2 * (1 + 3 + 2)  # two layers; before the capture, in warm-up replays, in rounds


def test_a_backend_that_fails_leaves_the_others(script):
    def broken():
        raise RuntimeError("no kernel")

    import gpu_work

    case = script.Case("eager", [(0, 5)], 1)
    found = script.measure(
        case, {"broken": broken, "bench": lambda: gpu_work.Backend("cpu")}, SimpleNamespace(device="cpu", rounds=1)
    )
    assert found["broken"] == {"failed": "RuntimeError: no kernel"}
    assert found["bench"]["done"] > 0
    assert not found["bench"]["finite"]  # this one writes no output, and the check sees it
