"""Requests from a Hugging Face config.json."""

import contextlib
import json

import pytest

from attncore import AttentionRequest
from attncore.registry.request_from_config_json import read, request_fields

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}


def fields(**more):
    found = request_fields({**LLAMA, **more})
    AttentionRequest(**found)
    return found


def test_a_common_model():
    assert fields() == {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
        "max_model_len": 8192,
    }


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        ({"head_dim": 64}, "head_size", 64),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.float32"}, "dtype", "float32"),
        ({"sliding_window": 4096}, "sliding_window", 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, "sliding_window", None),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, "sliding_window", None),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window", 4096),
        ({"attn_logit_softcapping": 50.0}, "logits_soft_cap", 50.0),
        ({"model_type": "bloom"}, "alibi", "standard"),
        ({"alibi": True}, "alibi", "standard"),
        ({"attn_config": {"alibi": True, "kv_n_heads": 4}}, "num_kv_heads", 4),
        ({"model_type": "gpt_oss"}, "sinks", True),
        ({"multi_query": True}, "num_kv_heads", 1),
        ({"num_key_value_heads": None}, "num_kv_heads", 32),
        ({"is_encoder_decoder": True}, "features", ("encoder", "encoder_decoder")),
        ({"text_config": {**LLAMA, "num_attention_heads": 16, "head_dim": 96}}, "head_size", 96),
    ],
)
def test_what_configs_say_in_their_ways(more, name, value):
    assert fields(**more).get(name) == value


def test_what_is_asked_for_is_not_looked_for():
    """As of models whose published ``text_config`` leaves out what their classes have (LLaVA 1.5, Gemma 3 of 4B)."""
    part = {"text_config": {"model_type": "llama", "torch_dtype": "float8_e4m3fn", "sliding_window": [1]}}
    with pytest.raises(ValueError, match=r"^config: num_attention_heads is missing; .* ask for it \(--num-heads\)"):
        request_fields(part)
    given = {"num_heads": 32, "head_size": 128, "dtype": "float16", "sliding_window": 8}
    assert request_fields(part, given=given) == {"num_kv_heads": 32}
    assert request_fields({**LLAMA, "hidden_size": 100}, tensor_parallel=3, given={**given, "num_kv_heads": 8}) == {
        "max_model_len": 8192
    }
    found = request_fields({"n_head": 12, "n_embd": 768}, given={"num_heads": 6})
    assert (found["num_kv_heads"], found["head_size"]) == (6, 64), "heads of a rank are as large as the model's"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma3_text", {"hidden_size": 3840, "sliding_window": 1024}),
        ("gemma2", {"hidden_size": 3584, "sliding_window": 4096, "logits_soft_cap": 50.0}),
    ],
)
def test_what_a_class_has_is_not_made_of_other_entries(kind, fields):
    """Gemma 3 of 12B, PaliGemma 2 of 10B: heads of 256, whatever the width over their number is."""
    text = {
        "model_type": kind,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": fields["hidden_size"],
    }
    found = request_fields({"text_config": text | ({"sliding_window": 1024} if kind == "gemma3_text" else {})})
    wanted = {"num_heads": 16, "num_kv_heads": 8, "head_size": 256, "dtype": "bfloat16", **fields}
    assert found == {name: value for name, value in wanted.items() if name != "hidden_size"}
    assert "logits_soft_cap" not in request_fields({"text_config": {**text, "attn_logit_softcapping": None}})


def test_latent_attention():
    found = fields(kv_lora_rank=512, qk_rope_head_dim=64)
    assert (found["use_mla"], found["num_kv_heads"], found["head_size"], found["head_size_v"]) == (True, 1, 576, 512)


def test_latent_attention_needs_no_size_of_plain_heads():
    """GLM 4.7 Flash: 20 heads do not divide the width, and no head_dim is stated; GLM 5 has no rotary part."""
    flash = {"num_attention_heads": 20, "hidden_size": 2048, "kv_lora_rank": 512, "v_head_dim": 256}
    assert request_fields({**flash, "qk_rope_head_dim": 64})["head_size"] == 576
    found = request_fields({**flash, "qk_rope_head_dim": 0, "head_dim": 0})
    assert (found["head_size"], found["head_size_v"]) == (512, 512)


_EMBEDDING_GEMMA = {
    **LLAMA, "model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_RECURRENT_GEMMA = {
    **LLAMA, "model_type": "recurrent_gemma", "attention_window_size": 2048, "layer_types": ["recurrent", "attention"],
}  # fmt: skip
_NEO = {"model_type": "gpt_neo", "num_heads": 16, "hidden_size": 2048, "window_size": 256}
_FALCON = {"model_type": "falcon", "num_attention_heads": 32, "hidden_size": 2048, "alibi": True, "multi_query": False}


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({**LLAMA, "model_type": "jetmoe", "hidden_size": 2048, "kv_channels": 128}, "head_size", 128),
        ({**LLAMA, "hidden_size": 2560, "kv_channels": 80, "attention_head_dim": 160}, "head_size", 160),
        ({**LLAMA, "head_dim": 192, "v_head_dim": 128}, "head_size_v", 128),
        ({**LLAMA, "head_dim": 128, "v_head_dim": 128}, "head_size_v", None),
        (
            {"num_attention_heads": 32, "hidden_size": 4096, "multi_query_attention": True, "multi_query_group_num": 2},
            "num_kv_heads",
            2,
        ),
        ({"num_attention_heads": 32, "hidden_size": 4096, "multi_query_group_num": 2}, "num_kv_heads", 32),
        ({**LLAMA, "model_type": "granite_swa"}, "sinks", True),
        ({**LLAMA, "model_type": "mimo_v2_flash"}, "sinks", True),
        ({"model_type": "baichuan", "num_attention_heads": 40, "hidden_size": 5120}, "alibi", "standard"),
        ({"model_type": "baichuan", "num_attention_heads": 32, "hidden_size": 4096}, "alibi", None),
        ({"n_head": 40, "n_embd": 5120, "position_embedding_type": "alibi"}, "alibi", "standard"),
        (_FALCON, "alibi", True),
        ({**LLAMA, "attn_config": {"alibi": True, "alibi_bias_max": 16}}, "alibi", True),
        ({**LLAMA, "model_type": "bert"}, "features", ("encoder",)),
        ({**LLAMA, "model_type": "bert", "is_decoder": True}, "features", None),
        (_NEO, "sliding_window", 256),
        ({**_NEO, "attention_types": [[["global", "local"], 12]]}, "sliding_window", 256),
        ({**_NEO, "attention_types": [[["global"], 24]]}, "sliding_window", None),
        ({**LLAMA, "model_type": "modernbert", "local_attention": 128}, "sliding_window", 65),
        ({**LLAMA, "model_type": "deberta-v2"}, "features", ("encoder",)),
        ({**LLAMA, "model_type": "bert-generation"}, "features", ("encoder",)),
        ({**LLAMA, "model_type": "qwen2", "is_causal": False}, "features", ("encoder",)),
        ({**LLAMA, "model_type": "qwen2", "is_causal": True}, "features", None),
        (_EMBEDDING_GEMMA, "features", ("encoder",)),
        (_EMBEDDING_GEMMA, "sliding_window", 257),
        ({**_EMBEDDING_GEMMA, "use_bidirectional_attention": False}, "sliding_window", 512),
        ({**_EMBEDDING_GEMMA, "use_bidirectional_attention": "all"}, "sliding_window", 257),
        ({**_EMBEDDING_GEMMA, "use_bidirectional_attention": "vision"}, "features", None),
        ({**_EMBEDDING_GEMMA, "model_type": "gemma2"}, "features", None),
        ({**LLAMA, "model_type": "other", "sliding_window_size": 512}, "sliding_window", 512),
        (_RECURRENT_GEMMA, "sliding_window", 2048),
        ({**LLAMA, "model_type": "openai_privacy_filter", "sliding_window": 128}, "sliding_window", 129),
        ({**LLAMA, "model_type": "splinter"}, "features", ("encoder",)),
        ({"model_type": "distilbert", "n_heads": 12, "dim": 768}, "head_size", 64),
        ({"model_type": "flaubert", "n_heads": 16, "emb_dim": 2048}, "head_size", 128),
        ({"model_type": "xglm", "attention_heads": 16, "d_model": 1024}, "head_size", 64),
    ],
)
def test_what_models_say_in_words_of_their_own(config, name, value):
    """A request without it names a backend that cannot run the model, or refuses one that can."""
    found = request_fields(config)
    AttentionRequest(**found)
    assert found.get(name) == value


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"index_topk": 2048, "kv_lora_rank": 512}, "index_topk: an index chooses the keys"),
        ({"relative_attention_num_buckets": 32}, "relative_attention_num_buckets: scores have a learnt bias"),
        ({"position_bias_num_buckets": 512}, "position_bias_num_buckets: scores have a learnt bias"),
        ({"rel_extent": 1024}, "rel_extent: scores have a learnt bias"),
        ({"index_topk_blocks": 16}, "index_topk_blocks: an index chooses the keys"),
        ({"sparse_attention_config": {"sparse_topk_blocks": 16}}, "sparse_attention_config: an index chooses"),
        ({"has_relative_attention_bias": True}, "has_relative_attention_bias: scores have a learnt part"),
        ({"model_type": "pegasus_x"}, "model_type: pegasus_x: tokens of the encoder see a block"),
        ({"relative_attention": True}, "relative_attention: scores have a learnt part"),
        ({"attention_type": "block_sparse"}, "attention_type: block_sparse: blocks of keys are left out"),
        ({"model_type": "longformer"}, "model_type: longformer: tokens see a window"),
        ({"model_type": "doge"}, "model_type: doge: a mask"),
    ],
)
def test_attention_that_no_backend_has_is_refused(entry, why):
    """DeepSeek V3.2, T5, DeBERTa and others: the rest of their requests is one that backends run, and get wrong."""
    with pytest.raises(ValueError, match=f"^config: {why}.*; no backend of attncore has that$"):
        request_fields({**LLAMA, **entry})
    assert request_fields({**LLAMA, **dict.fromkeys(entry)}) == request_fields(LLAMA)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"swa_head_dim": 512}, "swa_head_dim"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config.05.head_dim"),
    ],
)
def test_heads_of_several_sizes_are_asked_for_one_by_one(entry, name):
    """Gemma 4: a backend for its heads of 256 cannot run its layers of full attention, whose heads are of 512."""
    config = {**LLAMA, "head_dim": 256, **entry}
    with pytest.raises(ValueError, match=rf"^config: {name}: 512, but heads of other layers have a size of 256, .*"):
        request_fields(config)
    assert request_fields(config, given={"head_size": 512})["num_heads"] == 32
    assert request_fields({**config, "head_dim": 512})["head_size"] == 512


@pytest.mark.parametrize("layers", [None, [], {"0": None}, {"0": {}}, {"0": {"sliding_window": 8}}])
def test_layers_that_differ_in_nothing_else_are_one_request(layers):
    assert request_fields({**LLAMA, "per_layer_config": layers}) == request_fields(LLAMA)


def test_slopes_of_a_rank_are_not_the_standard_ones():
    """A kernel that makes the slopes of its number of heads by itself has those of no rank."""
    bloom = {**LLAMA, "model_type": "bloom"}
    assert request_fields(bloom)["alibi"] == "standard"
    assert request_fields(bloom, tensor_parallel=2)["alibi"] is True


def test_heads_are_shared_among_ranks():
    found = request_fields(LLAMA, tensor_parallel=16)
    assert (found["num_heads"], found["num_kv_heads"]) == (2, 1)
    with pytest.raises(ValueError, match="tensor_parallel: 3 does not divide the model's number of heads, 32"):
        request_fields(LLAMA, tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel: 4 ranks can neither share out the 6 key/value heads"):
        request_fields({**LLAMA, "num_attention_heads": 48, "num_key_value_heads": 6}, tensor_parallel=4)


def test_mistakes_name_the_entry(tmp_path):
    with pytest.raises(ValueError, match="config: num_attention_heads is missing"):
        request_fields({})
    with pytest.raises(ValueError, match="config: head_dim: 'x' is not a positive integer"):
        fields(head_dim="x")
    with pytest.raises(ValueError, match=r"config: .*nowhere.* cannot be read: No such file"):
        read(tmp_path / "nowhere")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"config: .*bad.json ends in the middle of a value, at column 1"):
        read(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        read(tmp_path / "list.json")


def test_a_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read(tmp_path) == read(tmp_path / "config.json")


def test_a_file_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"^config: .* is nested too deeply"):
        read(tmp_path)


@pytest.mark.parametrize("size", [10**4200, 10**5000, -(10**5000)], ids=["4200 digits", "5000 digits", "negative"])
@pytest.mark.parametrize(
    "field",
    [
        "num_attention_heads",
        "hidden_size",
        "head_dim",
        "num_key_value_heads",
        "kv_lora_rank",
        "dtype",
        "sliding_window",
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_of_thousands_of_digits_are_quoted_in_short(size, field, ranks):
    config = {
        "num_attention_heads": 3,
        "hidden_size": 384,
        "layer_types": [size, "sliding"],
        "alibi": size,
        field: size,
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        AttentionRequest(**request_fields(config, tensor_parallel=ranks))
    assert "Exceeds the limit" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("hiden_size", "hidden_size"),
        ("num_atention_heads", "num_attention_heads"),
        ("num_attention_head", "num_attention_heads"),
        ("max_position_embedings", "max_position_embeddings"),
        ("sliding_windw", "sliding_window"),
        ("haed_dim", "head_dim"),
    ],
)
def test_a_misspelt_entry_is_told(misspelt, meant):
    config = {**LLAMA, misspelt: 64}
    config.pop(meant, None)
    with pytest.raises(ValueError, match=rf"^config: {misspelt}: no entry that is read; did you mean {meant}\?$"):
        request_fields(config)
    with pytest.raises(ValueError, match=f"^config: {misspelt}: "):
        request_fields({"text_config": config})


@pytest.mark.parametrize("entry", [{"qk_nope_head_dim": 64}, {"hiden_size": 64}, {"layer_type": "basic"}, {"": 1}])
def test_other_entries_are_left_alone(entry):
    """Those of which nothing like them is read, and those beside what they are like."""
    assert request_fields({**LLAMA, **entry}) == request_fields(LLAMA)


def test_of_a_huge_configuration_no_spelling_is_compared():
    """To compare tens of thousands of names, each much like one that is read, takes a minute."""
    config = {**LLAMA, "haed_dim": 64} | {f"entry_{number}": 0 for number in range(1000)}
    assert request_fields(config) == request_fields(LLAMA)


def test_no_configuration_of_transformers_has_a_misspelt_entry(monkeypatch):
    configs = pytest.importorskip("transformers.models.auto.configuration_auto", reason="transformers is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # some ask the hub, and wait for it
    complaints, tried = [], 0
    for kind in configs.CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # a class that has no default, or whose parts are not installed
            config = configs.CONFIG_MAPPING[kind]().to_dict()
            tried += 1
            try:
                request_fields(config)
            except ValueError as error:  # such as of a model of images
                complaints += [f"{kind}: {error}"] if "did you mean" in str(error) else []
    assert complaints == []
    assert tried > 100


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_a_model_without_attention_is_told(kind):
    """What Mamba 2 calls num_heads are none of attention."""
    with pytest.raises(ValueError, match=f"^config: model_type: {kind} has no attention, so it needs no attention"):
        request_fields({"model_type": kind, "hidden_size": 64, "num_heads": 2, "head_dim": 32})


def test_without_heads_it_is_said_that_some_models_have_none():
    with pytest.raises(ValueError, match=r"num_attention_heads is missing; .*; a model that has no attention needs no"):
        request_fields({"model_type": "resnet", "hidden_sizes": [64, 128]})


def test_heads_of_a_decoder_beside_an_encoder():
    whisper = {"model_type": "whisper", "d_model": 384, "decoder_attention_heads": 6, "is_encoder_decoder": True}
    assert request_fields(whisper)["num_heads"] == 6
