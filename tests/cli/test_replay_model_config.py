"""A configuration of ``attncore replay --model`` is data: it runs nothing, fetches nothing, and takes what fits."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from attncore.cli import main
from attncore.registry.config_json import read_config
from attncore.replay.layers.misspelt_field import misspelt_field
from attncore.replay.model_error import ModelError, errors_as_model_errors

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

# isort: split
from transformers import BambaConfig

from attncore.replay.layers.model_from_config import checked_fields

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 8192,
}  # fmt: skip
CODE = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    "_attn_implementation": "somebody/kernels",
    "attn_implementation": "somebody/kernels",
    "_experts_implementation": "somebody/experts",
    "quantization_config": {"quant_method": "somebody", "load_in_4bit": True},
    "custom_pipelines": {"x": {"impl": "evil.Pipe"}},
    "_name_or_path": "somebody/model",
    "architectures": ["EvilModel"],
    "_commit_hash": "0" * 40,
}


@pytest.fixture
def model(tmp_path):
    """Runs ``replay --model`` over a folder with this configuration (fields, text, bytes): (code, standard error)."""
    folder = tmp_path / "model"
    folder.mkdir()
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0,30,4\n")

    def run(config, capsys, *words):
        if config is not None:
            data = config if isinstance(config, bytes | str) else json.dumps(config)
            (folder / "config.json").write_bytes(data if isinstance(data, bytes) else data.encode())
        code = main(["replay", str(trace), "--model", str(folder), "--num-blocks", "16", "--json", *words])
        out, err = capsys.readouterr()
        return code, out, err

    run.folder, run.trace = folder, trace
    return run


def refused(result, message):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert len(err) < 700
    assert message in err


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dtype": "float64"}, "dtype: 'float64' is not one of"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
    ],
)
def test_what_the_model_has_is_not_told_of_an_option(model, capsys, field, message):
    refused(model({**LLAMA, **field}, capsys), f"error: --model: {model.folder}: {message}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", "model_type: mamba has no attention"),
        ("resnet", "model_type: resnet is no model that says a next token; take a decoder of text"),
    ],
)
def test_a_model_that_cannot_attend_is_told_by_its_kind(model, capsys, kind, message):
    refused(model({"model_type": kind}, capsys), f"error: --model: {model.folder}: {message}")


@pytest.fixture
def no_network(monkeypatch):
    """What tried to reach the network."""
    tried = []

    def refuse(*where, **_):
        tried.append(where)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_code_beside_a_configuration_is_not_run(kind, model, no_network, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(model.folder))
    (model.folder / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    code, _, err = model({**LLAMA, **CODE, "model_type": kind}, capsys)
    assert (code, "is none of transformers' own" in err) == ((0, False) if kind == "llama" else (2, True))
    assert not (model.folder / "ran").exists()
    assert no_network == []


def test_no_question_is_asked_whether_code_may_run(model):
    """In a process of its own, whose standard input says yes to everything."""
    (model.folder / "config.json").write_text(json.dumps({**LLAMA, **CODE, "model_type": "evil"}))
    (model.folder / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    done = subprocess.run(
        [sys.executable, "-m", "attncore", "replay", str(model.trace), "--model", str(model.folder)],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (model.folder / "ran").exists()


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_name_that_is_no_file_is_not_fetched(name, model, no_network, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = main(["replay", str(model.trace), "--model", name])
    assert (code, no_network) == (2, [])
    assert f"{name} cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_tower": "somebody/clip"}, 'vision_tower: "somebody/clip" is no word'),
        ({"backbone": "hf-hub:somebody"}, 'backbone: "hf-hub:somebody" is no word'),
        ({"sub": {"kernel": "../a"}}, 'sub.kernel: "../a" is no word'),
        ({"sub": ["\x1b[31m"]}, 'sub: "\\u001b[31m" is no word'),
        ({"dtype": "hub"}, 'dtype: "hub" is not one of'),
        ({"torch_dtype": "os.system"}, 'torch_dtype: "os.system" is not one of'),
        ({"router_dtype": ["hub"]}, 'router_dtype: "hub" is not one of'),
        ({"hidden_size": 10**400}, 'hidden_size: "an integer of 1329 bits" does not fit'),
        ({"hidden_size": "9" * 90_000}, 'hidden_size: "9999'),
        ({"model_type": ["llama"]}, "model_type: missing"),
        ({"get_text_config": 3}, "'int' object is not callable"),
        ({"hidden_size": 33}, "--model: "),
        ({"hidden_size": "x"}, "--model: "),
        ({"hidden_size": -1}, "--model: "),
        ({"head_dim": 0}, "--model: "),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a positive integer"),
        ({"hidden_size": 0}, "hidden_size: 0 is not a positive integer"),
        ({"model_type": "gpt2", "n_layer": -1}, "n_layer: -1 is not a positive integer"),
        (
            {"model_type": "lama"},
            "is none of transformers' own; code of a configuration is not run; did you mean llama?",
        ),
        ({"vocab_size": 0}, "vocab_size: 0 is not a positive integer"),
        ({"vocab_size": 1.5}, "--model: "),
        ({"max_position_embeddings": -5}, "max_position_embeddings: -5 is not a positive integer"),
        ({"hidden_act": "os.system"}, "hidden_act: 'os.system' is no word that transformers knows"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0 lets a token see none"),
        ({"rope_scaling": {"rope_type": "somebody"}}, "rope_scaling.rope_type: 'somebody' is no word"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "--model: "),
        ({"rope_parameters": {"rope_theta": 0}}, "its own logits after"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_field_that_makes_no_model_is_one_line(fields, message, model, capsys):
    refused(model({**LLAMA, **fields}, capsys), message)


def test_a_division_by_zero_is_a_sentence():
    """Of fields that are not among the sizes which are compared with 1."""
    with pytest.raises(ModelError, match=r"^here: transformers divides by a number of it that is 0 \("):
        with errors_as_model_errors("here"):
            1 // 0  # noqa: B018


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is more than 1024"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers: 1000000000.0 is more than 1024"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**10]]}, "attention_types: 10000000000 is more"),
        ({"model_type": "cohere2_moe", "first_k_dense_replace": 3 * 10**9}, "first_k_dense_replace: 3000000000 is mor"),
        ({"vocab_size": 10**9}, "the model does not fit in memory: more than the"),
        ({"vocab_size": 2 * 10**12}, "the model does not fit in memory: more than the"),
        ({"intermediate_size": 2**31}, "the model does not fit in memory: more than the"),
        ({"model_type": "gpt2", "n_inner": 10**9, "n_embd": 4096}, "the model does not fit in memory: more than the"),
        ({"model_type": "nemotron", "num_labels": 10**9, "vocab_size": 10**11}, "the model does not fit in memory"),
    ],
)
def test_what_a_model_takes_is_counted_first(fields, message, model, capsys):
    model(LLAMA, capsys)  # what is imported is not counted below
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(model({**LLAMA, **fields}, capsys), message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "vocab_size_per_layer_input": 262144},  # of Gemma 3n
        {"model_type": "granite_swa", "layer_rope_theta": [10000.0, 5000000], "sliding_window": 8},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_a_number_that_layers_have_is_no_number_of_layers(fields, model, capsys):
    assert model({**LLAMA, **fields}, capsys)[0] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_more_bytes_than_are_free_is_refused(tied, model, capsys, monkeypatch):
    """Each number counts once: tied weights are one."""
    from attncore.replay.layers import model_from_config

    fields = {**LLAMA, "tie_word_embeddings": tied}
    made, _ = model_from_config.random_model("here", fields, 0, "cpu")
    size = sum(one.numel() * one.element_size() for one in (*made.parameters(), *made.buffers()))
    assert any(one is made.lm_head.weight for one in made.model.parameters()) == tied
    monkeypatch.setattr(model_from_config, "_checked_step", lambda *_: 0)
    monkeypatch.setattr(model_from_config, "available_bytes", lambda device: size - 1)
    refused(model(fields, capsys), "the model does not fit in memory: more than the 0.0 GiB that are free; take")
    monkeypatch.setattr(model_from_config, "available_bytes", lambda device: size)
    assert model(fields, capsys)[0] == 0


def test_modules_without_end_are_refused(model, capsys, monkeypatch):
    from attncore.replay.layers import model_from_config

    monkeypatch.setattr(model_from_config, "MAX_MODULES", 20)
    refused(model(LLAMA, capsys), "the model has more than 20 modules; take a smaller one")


SINUSOIDS = {
    "model_type": "xlm", "sinusoidal_embeddings": True, "max_position_embeddings": 2 * 10**6, "emb_dim": 4,
    "n_heads": 2, "n_layers": 1, "n_words": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most", "message"),
    [
        ("MAX_SECONDS", 3, "the model cannot be made: it gave no answer within 3 s; take a smaller one"),
        ("MAX_WORK", 100 << 20, "the model does not fit in memory (MemoryError); take a smaller one"),
    ],
)
def test_what_a_configuration_computes_is_limited(name, most, message, model, capsys, monkeypatch):
    """A loop over positions in plain Python and NumPy, of which torch's hooks see nothing."""
    from attncore.replay.layers import model_from_config

    monkeypatch.setattr(model_from_config, name, most)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(model(SINUSOIDS, capsys), message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def zeros(path):
    path.symlink_to("/dev/zero")


def gone(path):
    path.symlink_to(path.with_name("gone"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, "is not a regular file"),
        (folder, "Is a directory"),
        (zeros, "is not a regular file"),
        (gone, "No such file"),
        (b"", "config.json is empty; a model's configuration (a JSON object) is expected"),
        (b"[]", "holds a list, not an object"),
        (b" " * (4 * 2**20 + 1), "is larger than 4194304 bytes"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "is nested too deeply to be read: more than 32 levels"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1e999}', "holds a number that is too large: 1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "holds an integer of more than 4300 digits"),
        (b'{"a": 1, "a": 2}', 'has the field "a" twice in one object'),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (json.dumps(LLAMA).encode()[:-9], "config.json ends in the middle of a value, at column"),
        (b"{'a': 1}", "config.json is not JSON: expected a name in double quotes"),
    ],
    ids=lambda value: (
        value[:9].decode(errors="replace") if isinstance(value, bytes) else getattr(value, "__name__", "")
    ),
)
@pytest.mark.parametrize("command", ["replay", "explain"])
def test_a_file_that_is_no_configuration_is_one_line(make, message, command, model, capsys):
    if callable(make):
        make(model.folder / "config.json")
    if command == "replay":
        return refused(model(None if callable(make) else make, capsys), message)
    if not callable(make):
        (model.folder / "config.json").write_bytes(make)
    code = main(["explain", "--config", str(model.folder)])
    out, err = capsys.readouterr()
    return refused((code, out, err), message)


def test_infinity_is_read_as_transformers_writes_it(tmp_path):
    """Of the longest time step of Mamba 2, which each configuration with such layers has."""
    file = tmp_path / "config.json"
    BambaConfig(time_step_limit=(float("-inf"), float("inf"))).to_json_file(file)
    assert "__float__" in file.read_text()
    assert checked_fields("", read_config(file))["time_step_limit"] == [float("-inf"), float("inf")]


def test_a_link_to_a_configuration_is_followed(model, capsys, tmp_path):
    """The folders of caches are made of such links."""
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (model.folder / "config.json").symlink_to(tmp_path / "blob")
    assert model(None, capsys)[0] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hidden_size": ..., "hiden_size": 32},
            "model: hiden_size: LlamaConfig has no such field; did you mean hidden_size?\n",
        ),
        (
            {"hidden_size": 33},
            "model: The hidden size (33) is not a multiple of the number of attention heads",
        ),
    ],
)
def test_what_is_wrong_with_a_field_is_said_alone(fields, message, model, capsys):
    config = {name: value for name, value in {**LLAMA, **fields}.items() if value is not ...}
    refused(model(config, capsys), message)


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        ("llama", ["hiden_size"], "hidden_size"),
        ("llama", ["num_attention_haeds"], "num_attention_heads"),
        ("llama", ["hiden_size", "hidden_size"], None),  # what it resembles is given
        ("llama", ["qk_rope_head_dim", "rope_theta", "rope_scaling", "torch_dtype", "moe_intermediate_size"], None),
        ("deepseek_v3", ["v_heads_dim", "n_routed_experts"], "v_head_dim"),
        ("gpt2", ["hidden_size", "num_hidden_layers"], None),  # other names of fields
        ("gpt2", ["n_layers"], "n_layer"),
        ("gpt2", ["n_layers", "num_hidden_layers"], None),
    ],
)
def test_a_field_that_is_spelt_like_one_that_lacks_is_misspelt(kind, given, meant):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said = misspelt_field(CONFIG_MAPPING[kind], given)
    assert said.rpartition("; did you mean ")[2] == (f"{meant}?" if meant else "")


def test_fields_of_code_change_nothing(model, capsys):
    plain, named = (json.loads(model({**LLAMA, **more}, capsys)[1]) for more in ({}, {**CODE, "num_labels": 5}))
    assert plain["verification"]["failed"] == named["verification"]["failed"] == 0
    assert plain["verification"]["max_abs_error"] == named["verification"]["max_abs_error"]
