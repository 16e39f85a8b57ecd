"""benchmarks/nano_vllm.py compares what it says: tried on an engine of nano-vllm's interface, which is written here."""

import json
import sys
from pathlib import Path

import nano_stand_in
import pytest

torch = pytest.importorskip("torch")

MODULES = {
    "engine/model_runner": "import torch\nimport nano_stand_in\nModelRunner = nano_stand_in.runner_of(globals())\n",
    "engine/scheduler": "from nano_stand_in import Scheduler\n",
    "engine/block_manager": "import xxhash, flash_attn\n",
    "engine/sequence": "from nano_stand_in import Sequence\n",
    "utils/context": "from nano_stand_in import get_context, set_context\n",
    "sampling_params": "import types\nSamplingParams = types.SimpleNamespace\n",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        file = tmp_path / "nanovllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cuda)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("nanovllm", "xxhash", "flash_attn"):
            del sys.modules[name]


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("nano_vllm")


WORDS = ("--host-only", "--sizes", "5", "--prompt", "250", "--new", "20", "--budget", "300")


def test_arrays_are_compared_in_every_step(benchmark_module, checkout, tmp_path, capsys):
    assert benchmark_module.main([str(checkout), *WORDS, "--save", str(tmp_path / "found.json")]) == 0
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (row["size"], row["differs"], row["decode"]) == (5, [], 19)
    assert row["prefill"] > 5  # some prompts come in two chunks
    assert row["theirs_us"] > 0
    assert row["ours_us"] > 0


@pytest.mark.parametrize("name", ["slot_mapping", "context_lens", "block_tables", "cu_seqlens_k", "max_seqlen_q"])
def test_what_differs_is_named(benchmark_module, checkout, monkeypatch, capsys, name):
    inner = nano_stand_in.get_context
    calls = iter(range(10**6))

    def get_context():
        context = inner()
        found = getattr(context, name)
        if next(calls) % 2 == 0 and found is not None:  # ours, which is asked for first
            setattr(context, name, found + 1)
        return context

    monkeypatch.setattr(nano_stand_in, "get_context", get_context)
    assert benchmark_module.main([str(checkout), *WORDS]) == 1
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert {one.partition(": ")[2] for one in row["differs"]} == {name}


def test_the_floor_makes_a_step_of_the_one_before(benchmark_module, checkout):
    """Within a block its tensors are nano-vllm's; the tokens are those that were sampled."""
    nano = benchmark_module.Nano(checkout, host_only=True)
    runner = nano.host_runner()
    floor = benchmark_module.Floor(nano, runner)
    params = nano.sampling_params(max_tokens=9, temperature=1.0)
    seqs = [nano.sequence.Sequence(range(length), params) for length in (5, 29)]
    for seq, block in zip(seqs, (3, 7), strict=True):
        seq.block_table, seq.num_cached_tokens, seq.num_scheduled_tokens = [block], len(seq.token_ids) - 1, 1
    floor.prepare_decode(seqs)
    for tokens in ([40, 41], [50, 51]):
        floor.sampled(tokens)
        for seq, token in zip(seqs, tokens, strict=True):
            seq.token_ids.append(token)
            seq.num_cached_tokens += 1
        inputs, context = floor.prepare_decode(seqs), nano.get_context()
        expected, theirs = runner.prepare_decode(seqs), nano.get_context()
        assert list(benchmark_module.differences(theirs, context, expected, inputs, 2)) == []
        assert inputs[0].tolist() == tokens


def test_a_folder_without_a_checkout_is_refused(benchmark_module, tmp_path, capsys):
    assert benchmark_module.main([str(tmp_path), "--host-only"]) == 2
    assert "no folder nanovllm in it; give a clone of nano-vllm" in capsys.readouterr().err
