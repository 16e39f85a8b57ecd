"""benchmarks/compiled_floor.py and compiled_logits.py measure what they say: tried on a CPU, tiny."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


def test_the_floor_runs_a_step_of_every_row(tmp_path, monkeypatch):
    script = pytest.importorskip("compiled_floor")
    monkeypatch.setattr(script, "machine", dict)
    saved = tmp_path / "found.json"
    script.main(["--device", "cpu", "--tiny", "--rows", "3", "--context", "300", "--save", str(saved)])
    found = json.loads(saved.read_text())
    assert (found["rows"], found["context"]) == (3, 300)
    # 2 layers of 128 x 64, 64 x 64, 192 x 64, 64 x 96 and two norms; a norm and the head; keys and values of contexts.
    weights = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96 + 2 * 64) + 64 + 512 * 64
    assert found["bytes"] == 4 * (weights + 2 * 2 * 3 * 300 * 2 * 16)
    assert min(found["step_us"], found["copy_us"]) > 0


def test_the_floor_attends_over_the_whole_context():
    script = pytest.importorskip("compiled_floor")
    bare = script.Bare(script.arguments(["--device", "cpu", "--tiny", "--rows", "2", "--context", "300"]))
    torch.manual_seed(0)
    bare.cache.normal_()
    query, key, value = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    keys, values = bare.cache[0].clone()
    out = bare.attend(query, keys, values, key, value, bare.lengths, bare.table)
    of_row = [one[1].flatten(0, 1)[:300] for one in (keys.view(2, 2, 256, 2, 16), values.view(2, 2, 256, 2, 16))]
    of_row[0][299], of_row[1][299] = key[1], value[1]
    k, v = (one.repeat_interleave(2, 1).transpose(0, 1) for one in of_row)
    expected = torch.softmax(query[1][:, None] @ k.transpose(1, 2) * 16**-0.5, -1) @ v
    torch.testing.assert_close(out[1], expected[:, 0])


def test_logits_of_compiled_layers_are_compared_with_float32(tmp_path, monkeypatch):
    script = pytest.importorskip("compiled_logits")
    monkeypatch.setattr(script, "machine", dict)
    saved = tmp_path / "found.json"
    words = ["--device", "cpu", "--tiny", "--backends", "reference", "--compiler", "eager", "--save", str(saved)]
    assert not script.main(words)
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["logits"] == 3 * 5
    assert max(row["eager_error"], row["compiled_error"], row["apart"]) < 1e-5
    assert row["same_best"] == 1.0

    right = script.paged_logits

    def shifted(model, texts, backend, compiled):
        return right(model, texts, backend, compiled) + (0.01 if compiled else 0.0)

    monkeypatch.setattr(script, "paged_logits", shifted)
    assert script.main(words)
