"""``attncore replay --model``: a model of transformers beside its metadata, its logits checked."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

from attncore.cli import main

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 8192,
}  # fmt: skip
HYBRID = {
    **LLAMA, "model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 40, "query_pre_attn_scalar": 8}
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(facts):
        path = tmp_path / "config.json"
        path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
        return str(path)

    return write


WORDS = ["--requests", "1", "--num-blocks", "40", "--verify-every", "99"]
"""Of a run that takes little time."""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [(i, 30 + 37 * i % 90, 3 + i % 5) for i in range(12)]
    lines = [f"2023-11-16 18:15:{i:02}.0000000,{prompt},{output}" for i, prompt, output in rows]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("facts", [LLAMA, GEMMA, DEEPSEEK], ids=["llama", "gemma2", "deepseek_v3"])
def test_logits_are_those_of_the_model_alone(facts, config, trace, capsys):
    assert main(["replay", trace, "--model", config(facts), "--verify-every", "2", "--rate", "100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verification"]["checked"] > 10
    assert report["verification"]["failed"] == 0
    assert report["model_us"]["p50"] > 0
    assert report["attention_us"] is None
    layers = report["layers"].partition(" of ")
    assert (layers[0], ", with latent caches: " in layers[2]) == ("2", "kv_lora_rank" in facts)
    assert layers[2].endswith(
        ": 4 heads, 1 key/value head of 24" if facts is DEEPSEEK else " 4 heads, 2 key/value heads of 8"
    )


def test_numbers_that_the_model_does_not_read_are_said(config, trace, capsys):
    facts = {**LLAMA, "num_kv_heads": 2, "n_layers": 2, "use_it": True, "_odd": 3, "\x1b[31m": 1}
    path = config({name: value for name, value in facts.items() if name != "num_key_value_heads"})
    assert main(["replay", trace, "--model", path, *WORDS]) == 0
    fields = "num_kv_heads, n_layers, \\x1b[31m"
    expected = f"attncore replay: note: {path}: {fields}: LlamaConfig has no such fields, which change nothing\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({}, ""),
        ({"rope_theta": 10000, "head_dim": 8, "pretraining_tp": 1, "bos_token_id": 1}, ""),
        ({"n_ctx": 3}, "n_ctx: LlamaConfig has no such field, which changes nothing"),
        (
            {f"strange_{index}": index for index in range(9)},
            ", ".join(f"strange_{index}" for index in range(6))
            + " and 3 more fields: LlamaConfig has no such fields, which change nothing",
        ),
        ({"model_type": "qwen3_moe", "head_dim": 8}, ""),  # which is read, and no field of the class
        ({"model_type": "gpt2", "n_ctx": 1024}, "n_ctx: GPT2Config has no such field, which changes nothing"),
    ],
    ids=["none", "read", "one", "many", "undeclared", "published"],
)
def test_which_numbers_are_not_read(facts, note):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from attncore.replay.layers.unread_fields import note_of_unread_fields

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, **facts}))
    assert note_of_unread_fields(model, facts) == note


@pytest.mark.parametrize("why", ["terminal", "long", ""])
def test_what_is_to_run_is_said_first(why, config, trace, capsys, monkeypatch):
    from attncore.cli import replay

    if why == "terminal":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if why == "long":
        monkeypatch.setattr(replay, "_LONG", 19_616 * 33 - 1)
    assert main(["replay", trace, "--model", config(LLAMA), *WORDS]) == 0
    said = (
        "attncore replay: runs 1 request of 33 tokens in all through a model of 19,616 weights on cpu: 2 of "
        "LlamaForCausalLM: 4 heads, 2 key/value heads of 8; --requests N runs fewer"
    )
    assert (said in " ".join(capsys.readouterr().err.split())) == bool(why)


def test_transformers_says_nothing_of_a_vision_tower(config, trace, capsys):
    """Which has no attention to exchange, and does not run."""
    text = {**LLAMA, "model_type": "qwen2", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "mlp_dim": 16}
    path = config({"model_type": "got_ocr2", "text_config": text, "vision_config": vision})
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert main(["replay", trace, "--model", path, *WORDS]) == 0
    finally:
        logger.removeHandler(handler)
    assert said == []


@pytest.mark.parametrize("num_blocks", [20, 500])
def test_a_hybrid_model_keeps_its_states(num_blocks, config, trace, capsys):
    words = ["--verify-every", "2", "--rate", "1e4", "--num-blocks", str(num_blocks), "--block-size", "8"]
    assert main(["replay", trace, "--model", config(HYBRID), "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers"] == "2 of FalconH1ForCausalLM, beside recurrent ones: 4 heads, 2 key/value heads of 8"
    assert bool(report["preemptions"]) == (num_blocks == 20)
    assert (report["prefix_hit_tokens"], report["verification"]["failed"]) == (0, 0)
    assert report["verification"]["checked"] > 10


@pytest.mark.parametrize("field", ["mamba_chunk_size", "mamba_d_state"])
def test_what_states_take_is_counted_first(field, config, trace, capsys, monkeypatch):
    """A weight's size says nothing of it."""
    monkeypatch.setattr("attncore.replay.layers.model_from_config.available_bytes", lambda device: 1 << 30)
    assert main(["replay", trace, "--model", config({**HYBRID, field: 10**5})]) == 2
    err = capsys.readouterr().err
    assert re.search(
        r"config.json: (a forward pass does not fit in memory|a step of \d+ tokens makes 4 tensors of)", err
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "facts", [{"intermediate_size": 10**5}, {"num_attention_heads": 512, "num_key_value_heads": 1, "hidden_size": 4096}]
)
def test_the_largest_tensor_of_a_request_is_counted_first(facts, config, trace, capsys, monkeypatch):
    """Of what layers make between their weights, and of what the model's own attention compares in the check."""
    monkeypatch.setattr("attncore.replay.layers.model_from_config.available_bytes", lambda device: 300 << 20)
    trace_of_one = trace.replace("trace.csv", "long.csv")
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0000000,1000,2"
    Path(trace_of_one).write_text(rows)
    assert main(["replay", trace_of_one, "--model", config({**LLAMA, **facts})]) == 2
    assert "config.json: a request of 1002 tokens makes 4 tensors of" in capsys.readouterr().err


def test_weights_and_the_tensors_of_a_step_are_counted_together(config, trace, capsys, monkeypatch):
    """Of a step in which several requests run, too."""
    free, weights = 0, 2 * 3 * 32 * 10**5 * 4
    monkeypatch.setattr("attncore.replay.layers.model_from_config.available_bytes", lambda device: free)
    words = ["replay", trace, "--model", config({**LLAMA, "intermediate_size": 10**5}), "--rate", "1e6"]
    words += ["--max-num-batched-tokens", "200", "--max-num-seqs", "9"]
    tensors = 4 * 200 * 10**5 * 4
    free = tensors + weights // 2
    assert main(words) == 2
    assert "a step of 200 tokens makes 4 tensors of 0.1 GiB, and the model leaves 0.3 GiB" in capsys.readouterr().err
    free = tensors + weights + weights // 2
    assert main(words) == 0


def test_the_states_of_all_requests_are_counted(config, trace, capsys, monkeypatch):
    monkeypatch.setattr("attncore.replay.layers.model_from_config.available_bytes", lambda device: 1 << 24)
    monkeypatch.setattr("attncore.replay.layers.model_from_config.TENSORS_AT_ONCE", 0)
    words = ["replay", trace, "--model", config(HYBRID), "--max-num-seqs"]
    assert main([*words, "9999", "--max-num-batched-tokens", "9999"]) == 2
    assert "the states of 9999 requests do not fit in memory: 0.0 GiB, more than half" in capsys.readouterr().err
    assert main([*words, "4"]) == 0


@pytest.mark.parametrize(
    ("facts", "taken", "advice"),
    [
        (LLAMA, 2 * 40 * 16 * 2 * 2 * 8 * 4, "pass a smaller --num-blocks\n"),
        (  # of each request a state of 4 heads of 8 x 8, and 3 columns of a convolution over 48 numbers
            HYBRID, 2 * (40 * 16 * 2 * 2 * 8 * 4 + 6 * (4 * 8 * 8 + 48 * 4) * 4),
            "for the states of 5 requests (they take 0.0 GiB, and 0.0 GiB are free); pass a smaller --num-blocks or "
            "--max-num-seqs\n",
        ),
    ],
    ids=["llama", "falcon_h1"],
)  # fmt: skip
def test_what_caches_take_is_counted_first(facts, taken, advice, config, trace, capsys, monkeypatch):
    from attncore.replay.layers import cache_memory

    words = ["replay", trace, "--model", config(facts), "--requests", "1", "--num-blocks", "40", "--max-num-seqs", "5"]
    monkeypatch.setattr("attncore.replay.layers.model_from_config.TENSORS_AT_ONCE", 0)
    monkeypatch.setattr(cache_memory, "available_bytes", lambda device: (taken - 1) / cache_memory.MOST)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("attncore: error: --num-blocks: no memory for 2 caches of 40 blocks of 16")
    assert err.endswith(advice)
    assert err.count("\n") == 1
    monkeypatch.setattr(cache_memory, "available_bytes", lambda device: (taken + 1) / cache_memory.MOST)
    assert main(words) == 0


def test_caches_leave_what_a_step_takes(config, trace, capsys, monkeypatch):
    from attncore.replay.layers import cache_memory

    step = 4 * 200 * 10**5 * 4
    monkeypatch.setattr(cache_memory, "available_bytes", lambda device: step + (1 << 16))
    words = ["replay", trace, "--model", config({**LLAMA, "intermediate_size": 10**5}), "--num-blocks", "400"]
    assert main([*words, "--max-num-batched-tokens", "200"]) == 2
    assert (
        "(they take 0.0 GiB, and 0.0 GiB are free beside the tensors of a step); pass a smaller"
        in capsys.readouterr().err
    )


def test_states_in_anothers_slot_are_found(config, trace, capsys, monkeypatch):
    from attncore.builder.persistent.state_step import StateStep

    own = StateStep.state_slot.fget
    monkeypatch.setattr(StateStep, "state_slot", property(lambda self: own(self) * 0 + 1))
    assert main(["replay", trace, "--model", config(HYBRID), "--verify-every", "2", "--rate", "1e3"]) == 1
    assert "a logit differs from the model's own" in capsys.readouterr().out


def test_a_wrong_cache_is_found(config, trace, capsys, monkeypatch):
    from attncore.reference import ReferenceImpl

    sound = ReferenceImpl.forward

    def forward(self, query, key, value, *rest):
        return sound(self, query, key, value * 0.5, *rest)

    monkeypatch.setattr(ReferenceImpl, "forward", forward)
    assert main(["replay", trace, "--model", config(LLAMA), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "a logit differs from the model's own by" in report["verification"]["failures"][0]


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        ("{", [], "ends in the middle of a value, at column 1"),
        ({"hidden_size": 3}, [], "--model: "),
        (
            {"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 1, "vocab_size": 64},
            [],
            "calls transformers'",
        ),
        ({**LLAMA, "max_position_embeddings": 50}, [], "the request in row 2 has 71 tokens; the model's max_position"),
        ({**LLAMA, "vocab_size": 2 * 10**12}, [], "the model does not fit in memory"),
        ({**LLAMA, "model_type": "bert"}, [], "BertLMHeadModel is an encoder and says no next token"),
        (LLAMA, ["--metadata-only"], "--metadata-only: given beside --model"),
        (LLAMA, ["--layers", "3"], "--layers: given beside --model"),
        (LLAMA, ["--speculative", "2"], "--speculative: given beside --model"),
    ],
)
def test_what_makes_no_model_is_one_line(facts, options, message, config, trace, capsys):
    assert main(["replay", trace, "--model", config(facts), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_missing_file_is_said(trace, capsys):
    assert main(["replay", trace, "--model", "/nowhere.json"]) == 2
    assert "--model: /nowhere.json cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["step", "check"])
def test_a_run_that_outgrows_memory_is_one_line(where, config, trace, capsys, monkeypatch):
    import torch

    from attncore.reference import ReferenceImpl
    from attncore.replay.checks.model_check import EagerAttention

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.00 GiB\nof 1")

    owner, name = (ReferenceImpl, "forward") if where == "step" else (EagerAttention, "__enter__")
    monkeypatch.setattr(owner, name, full)
    assert main(["replay", trace, "--model", config(LLAMA)]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(
        f"attncore: error: --model: {'a step' if where == 'step' else 'the check'} of"
    )
    assert "does not fit in memory (CUDA out of memory. Tried to allocate 24.00 GiB); " in captured.err
    assert "Traceback" not in captured.err
