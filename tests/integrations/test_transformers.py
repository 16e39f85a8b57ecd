"""Models of transformers over attncore's caches, metadata and backends: their output stays the same."""

import dataclasses
import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from integrations.models import DECODERS, DYNAMIC, SHAPE, decoder, encoder, greedy, phi3  # noqa: E402

from attncore import AttentionType, InputBatch, MetadataBuilder, NoBackendError  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attention_layers,
    attncore_context,
    paged_caches,
    recurrent_layers,
    select_for_model,
    use_latent_caches,
)
from attncore.integrations.transformers.attention_interface import using_attncore  # noqa: E402

BLOCK = 8


class Rows:
    """Requests with blocks of their own, and a model whose layers attend over them."""

    def __init__(self, model, num_blocks=64, **fields):
        self.model, choice = model, select_for_model(model, block_size=BLOCK, **fields)
        self.backend = choice.create()
        self.caches = paged_caches(model, self.backend, num_blocks)
        self.batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=BLOCK)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=512)
        self.fresh = iter(range(1, num_blocks))

    def add(self, name, tokens):
        self.batch.add_request(name, [next(self.fresh) for _ in range(-(-tokens // BLOCK))])

    def __call__(self, tokens):
        """Runs ``tokens`` of each request; the logits of each request's last token."""
        scheduled = {name: len(ids) for name, ids in tokens.items()}
        metadata = self.builder.build({**dict.fromkeys(self.batch.req_ids, 0), **scheduled})
        ids = torch.tensor([list(itertools.chain.from_iterable(tokens[name] for name in metadata.req_ids))])
        self.model.set_attn_implementation("attncore")
        with torch.inference_mode(), attncore_context(metadata, self.caches):
            logits = self.model(
                input_ids=ids,
                position_ids=metadata.positions[None],
                use_cache=False,
                logits_to_keep=metadata.logits_indices,
            ).logits[0]
        return dict(zip(metadata.req_ids, logits, strict=True))


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_eager_generate(name):
    model = decoder(name)
    generator = torch.Generator().manual_seed(0)
    prompts = {
        row: torch.randint(0, 128, (length,), generator=generator).tolist() for row, length in enumerate((1, 9, 30))
    }
    rows, said = Rows(model), {row: [] for row in prompts}
    for row, prompt in prompts.items():
        rows.add(row, len(prompt) + 10)
    logits = rows({row: prompt[: len(prompt) // 2 + 1] for row, prompt in prompts.items()})  # prompts in two chunks
    rest = {row: prompt[len(prompt) // 2 + 1 :] for row, prompt in prompts.items()}
    logits |= rows({row: part for row, part in rest.items() if part})
    for _ in range(10):
        step = {row: [int(logits[row].argmax())] for row in prompts}
        for row, token in step.items():
            said[row] += token
        logits = rows(step)
    assert said == {row: greedy(model, prompt, 10) for row, prompt in prompts.items()}


def test_layers_say_what_they_ask_for():
    layers = attention_layers(decoder("gemma2"))
    assert [layer.name for layer in layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [layer.sliding_window for layer in layers] == [5, None]
    assert [layer.logits_soft_cap for layer in layers] == [50.0, 50.0]
    assert [layer.scale for layer in layers] == [pytest.approx(24**-0.5)] * 2
    model = decoder("gpt_oss")
    layers = attention_layers(model)
    assert [layer.sliding_window for layer in layers] == [6, None]
    assert layers[1].sinks is model.model.layers[1].self_attn.sinks
    assert model.config._attn_implementation != "attncore"  # looking leaves the model as it was


@pytest.mark.parametrize(("kind", "first"), [("Bert", 0), ("Roberta", 2)])
def test_an_encoder_attends_within_each_row(kind, first):
    """RoBERTa's first position is padding_idx + 1."""
    model = encoder(getattr(transformers, f"{kind}Model"), getattr(transformers, f"{kind}Config"))
    rows = [[5, 6, 7], [4], list(range(20, 31))]
    caches = paged_caches(model, select_for_model(model, block_size=BLOCK).create(), 4)
    backend = next(iter(caches.impls.values())).backend
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build_profile(len(row) for row in rows)
    expected = [model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows]
    model.set_attn_implementation("attncore")
    with attncore_context(metadata, caches):
        ids = torch.tensor([list(itertools.chain(*rows))])
        found = model(input_ids=ids, position_ids=metadata.positions[None] + first)
    torch.testing.assert_close(found.last_hidden_state[0], torch.cat(expected), atol=1e-5, rtol=1e-4)
    assert list(caches.values()) == [None, None]


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEModel"), reason="this transformers has no NeoMME")
def test_layers_whose_configuration_says_windows_one_by_one():
    """Of such a configuration the window cannot be asked, but of its layers alone."""
    shape = {name: size for name, size in SHAPE.items() if name != "num_hidden_layers"}
    windows = {1: {"sliding_window": 9}, 2: {"sliding_window": None}}
    config = transformers.NeoMMEConfig(**shape, num_hidden_layers=3, sliding_window=4, per_layer_config=windows)
    layers = attention_layers(transformers.NeoMMEModel(config).eval())
    assert [layer.sliding_window for layer in layers] == [5, 10, None]


def test_what_no_backend_has_fails_at_selection_with_the_layer():
    layers = attention_layers(decoder("gpt_oss"))
    with pytest.raises(NoBackendError, match=r"(?s)^layer model\.layers\.0\.self_attn: .*cuda_graph"):
        select_for_model(decoder("gpt_oss"), layers=layers, backend="reference", cuda_graph="always")
    other = dataclasses.replace(layers[1], name="b", head_size=8)
    with pytest.raises(ValueError, match=r"head_size: 8 in layer b, 16 in model\.layers\.0"):
        select_for_model(decoder("gpt_oss"), layers=(layers[0], other))


def test_the_wrong_place_and_the_wrong_shape_are_said():
    model = decoder("llama")
    rows = Rows(model)
    model.set_attn_implementation("attncore")
    with pytest.raises(RuntimeError, match=r"LlamaAttention: the attention implementation 'attncore' ran outside"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    rows.add("a", 16)
    metadata = rows.builder.build({"a": 4})
    with attncore_context(metadata, rows.caches):
        with pytest.raises(ValueError, match=r"input_ids: 2 rows found; give the tokens of all requests as one row"):
            model(input_ids=torch.ones((2, 2), dtype=torch.int64), use_cache=False)
        mask = torch.ones((1, 1, 4, 4), dtype=torch.bool)
        with pytest.raises(ValueError, match="attention_mask: a mask was given"):
            model(input_ids=torch.ones((1, 4), dtype=torch.int64), attention_mask=mask, use_cache=False)
    other = decoder("llama")
    other.set_attn_implementation("attncore")
    with attncore_context(metadata, paged_caches(other, rows.backend, 4)):
        with pytest.raises(RuntimeError, match="has no cache in the context"):
            model(input_ids=torch.ones((1, 4), dtype=torch.int64), use_cache=False)


def test_a_model_with_attention_of_its_own_is_said():
    class Own(torch.nn.Module):
        device = torch.device("cpu")

        class config:  # noqa: N801
            _attn_implementation = "eager"

        def set_attn_implementation(self, name):
            self.config._attn_implementation = name

        def forward(self, input_ids, use_cache):
            return input_ids

    with pytest.raises(ValueError, match="model: no layer of Own calls transformers' attention interface"):
        attention_layers(Own())


def _other(kind, config, **more):
    shape = {name: size for name, size in SHAPE.items() if name not in ("num_hidden_layers", "intermediate_size")}
    return getattr(transformers, kind)(getattr(transformers, config)(**{**shape, **more})).eval()


@pytest.mark.parametrize(
    ("kind", "config", "more", "says"),
    [
        (
            "Lfm2ForCausalLM",
            "Lfm2Config",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "intermediate_size": 96},
            "model: Lfm2ForCausalLM has layers of type conv",
        ),
        (
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            {"num_hidden_layers": 2, "num_local_experts": 2, "intermediate_size": 96, "pad_token_id": 0},
            "model: Llama4ForCausalLM has layers of type chunked_attention",
        ),
        (
            "BartForCausalLM",
            "BartConfig",
            {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 96},
            "model: BartForCausalLM takes no position_ids",
        ),
        (
            "BartForConditionalGeneration",
            "BartConfig",
            {"d_model": 64, "decoder_layers": 1, "encoder_layers": 1, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96},
            "model: BartForConditionalGeneration has an encoder beside its decoder",
        ),
        (
            "T5EncoderModel",
            "T5Config",
            {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4},
            "layer encoder.block.0.layer.0.SelfAttention: it passes position_bias",
        ),
        (
            "SplinterModel",
            "SplinterConfig",
            {"num_hidden_layers": 1, "intermediate_size": 96},
            "layer encoder.layer.0.attention.self: SplinterSelfAttention does not say whether it is causal",
        ),
        (
            "MobileBertModel",
            "MobileBertConfig",
            {"num_hidden_layers": 1, "intermediate_size": 96},
            "model: MobileBertModel makes each token's embedding of its neighbours' too",
        ),
        (
            "LayoutLMModel",
            "LayoutLMConfig",
            {"num_hidden_layers": 1, "intermediate_size": 96},
            "attention_mask: a mask was given",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_model_that_would_say_something_else_is_refused(kind, config, more, says):
    with pytest.raises(ValueError) as caught:
        attention_layers(_other(kind, config, **more))
    assert str(caught.value).startswith(says)


def test_queries_that_are_scaled_by_their_place_in_the_row_are_refused():
    """That of a token of the second request would be counted from the first one's."""
    more = {"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "intermediate_size": 96, "pad_token_id": 0}
    model = _other("Llama4ForCausalLM", "Llama4TextConfig", num_hidden_layers=2, no_rope_layers=[1, 0], **more)
    with pytest.raises(ValueError, match=r"^layer model.layers.1.self_attn: .* fewer than 8192 tokens, none of which"):
        attention_layers(model)
    model.model.layers[1].self_attn.attn_temperature_tuning = False
    assert len(attention_layers(model)) == 2


def test_an_encoder_whose_layers_are_told_that_they_are_runs_as_one():
    model = _other("SplinterModel", "SplinterConfig", num_hidden_layers=1, intermediate_size=96)
    for module in model.modules():
        if type(module).__name__ == "SplinterSelfAttention":
            module.is_causal = False
    assert [layer.attn_type for layer in attention_layers(model)] == [AttentionType.ENCODER_ONLY]


def test_a_layer_that_does_not_say_whether_it_is_causal_is_taken_for_causal():
    model = decoder("llama")
    for layer in model.model.layers:
        del layer.self_attn.is_causal
    assert {layer.attn_type for layer in attention_layers(model)} == {AttentionType.DECODER}


WINDOW_IN_MASKS = [
    ("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4}),
    (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "more"), WINDOW_IN_MASKS, ids=lambda value: str(value)[:17])
def test_a_window_that_is_only_in_a_models_masks_is_refused(kind, config, more):
    more = {**more, "num_hidden_layers": 2, "intermediate_size": 96}
    with pytest.raises(ValueError, match=r"^layer model\.layers\.\d\.self_attn: .* sliding window, 5, in the mask"):
        attention_layers(_other(kind, config, **more, sliding_window=5))
    model = _other(kind, config, **more, sliding_window=5)
    model.config.max_position_embeddings = 5  # as the error advises
    assert [layer.sliding_window for layer in attention_layers(model)] == [None, None]


def test_an_encoder_whose_masks_are_causal_is_refused():
    """Gemma2 has the field for its layers alone: eager attention goes by the mask."""
    model = decoder("gemma2", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match=r"^layer model\.layers\.0\..* not causal, .* makes causal masks alone"):
        attention_layers(model)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    assert {one.attn_type for one in attention_layers(model)} == {AttentionType.DECODER}


def test_an_encoder_whose_mask_has_another_window_is_refused():
    """Eager attention goes by the mask, which has 5 tokens on either side, and flash attention by the layer's 5."""
    model = decoder("mistral", sliding_window=5, is_causal=False)
    says = (
        r"^layer model\.layers\.0\.self_attn: .* passes the sliding window 5 .* the mask .* has 6, .* longer than 5 set"
    )
    with pytest.raises(ValueError, match=says):
        attention_layers(model)
    model.config.max_position_embeddings = 5
    assert {(one.sliding_window, one.attn_type) for one in attention_layers(model)} == {(5, AttentionType.ENCODER_ONLY)}


@pytest.mark.parametrize(("now", "has"), [(12, "12"), (3, "3"), (256, "none")])
def test_a_layer_whose_mask_has_another_window_is_refused(now, has):
    """Gemma2's layers keep the window that they were made with, and its masks follow the configuration."""
    model = decoder("gemma2")  # a window of 5
    model.config.sliding_window = now
    limit = min(5, now)
    says = rf"^layer model\.layers\.0\.self_attn: .* window 5 .* has {has}[;,] .* no longer than {limit} set"
    with pytest.raises(ValueError, match=says):
        attention_layers(model)
    model.config.max_position_embeddings = limit  # as the error advises
    assert [layer.sliding_window for layer in attention_layers(model)] == [5, None]


def test_a_window_that_no_mask_has_is_refused():
    """Olmoe's layers pass a window, and its model makes causal masks without one."""
    shape = {"num_hidden_layers": 1, "intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match=r"passes the sliding window 5 to its attention, .* has none; "):
        attention_layers(_other("OlmoeForCausalLM", "OlmoeConfig", **shape, sliding_window=5))
    model = _other("OlmoeForCausalLM", "OlmoeConfig", **shape)
    assert [layer.sliding_window for layer in attention_layers(model)] == [None]


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}])
def test_a_decoder_whose_masks_are_for_an_encoder_is_refused(window):
    """StableLm's layers say that they are causal whatever the configuration does."""
    shape = {"num_hidden_layers": 1, "intermediate_size": 96, **window}
    model = _other("StableLmForCausalLM", "StableLmConfig", **shape, is_causal=False)
    says = r"^layer model\.layers\.0\..* says that it is causal, .* makes masks for an encoder alone; set is_causal"
    with pytest.raises(ValueError, match=says):
        attention_layers(model)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    assert {one.attn_type for one in attention_layers(model)} == {AttentionType.ENCODER_ONLY}


@pytest.mark.parametrize(
    ("kind", "config", "more", "windows"),
    [
        ("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4, "sliding_window": 256}, [None, None]),
        ("Qwen2ForCausalLM", "Qwen2Config", {"sliding_window": 5}, [None, None]),
        (
            "Qwen2ForCausalLM",
            "Qwen2Config",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
            [None, 5],
        ),
        ("LlamaForCausalLM", "LlamaConfig", {"sliding_window": 256}, [None, None]),
        (
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            {"sliding_window": 5, "layer_types": ["full_attention"] * 2},
            [None, None],
        ),
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": None}, [None, None]),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}, [5, 5]),
    ],
    ids=["as long as requests", "off", "some layers", "unread", "no such layer", "none", "passed"],
)
def test_a_window_in_the_configuration_that_no_mask_holds_alone_is_not_refused(kind, config, more, windows):
    model = _other(kind, config, **more, num_hidden_layers=2, intermediate_size=96)
    before = model.config._attn_implementation
    assert [layer.sliding_window for layer in attention_layers(model)] == windows
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["Moshi", "Llama"])
def test_a_window_that_transformers_cache_alone_has_is_refused(kind):
    """Moshi is made so; a Llama's configuration may hold the field, which its layers do not read."""
    more = {"ffn_dim": 96} if kind == "Moshi" else {"intermediate_size": 96}
    model = _other(f"{kind}ForCausalLM", f"{kind}Config", **more, num_hidden_layers=2, sliding_window=9)
    says = rf"^model: {kind}ForCausalLM has config\.sliding_window 9, by which transformers' cache keeps so many tokens"
    with pytest.raises(ValueError, match=says):
        attention_layers(model)
    for now in ({"sliding_window": None}, {"sliding_window": 9, "max_position_embeddings": 9}):
        vars(model.config).update(now)
        assert [layer.sliding_window for layer in attention_layers(model)] == [None, None]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning", "ignore:.*deprecated:UserWarning")
def test_a_dynamically_quantised_model_is_refused():
    """It rounds each layer's input by its largest number, of whichever request."""
    model = torch.ao.quantization.quantize_dynamic(decoder("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"^model: model\.layers\.0\.self_attn\.q_proj is quantised dynamically"):
        attention_layers(model)


def test_a_causal_layer_that_runs_twice_is_refused():
    model = decoder("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.self_attn: it runs twice in a forward pass"):
        attention_layers(model)


def gemma3_dynamic():
    rope = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    shape = {**SHAPE, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": rope}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape))


@pytest.mark.parametrize(
    ("model", "kind", "advice"),
    [
        (phi3, "is longrope", "of up to 32 tokens set config.max_position_embeddings of the loaded model to 32"),
        (
            lambda: decoder("llama", rope_parameters=DYNAMIC),
            "is dynamic",
            "up to max_position_embeddings, 256: for requests of so many tokens set model.model.rotary_emb.rope_type",
        ),
        (
            gemma3_dynamic,
            "of its full_attention layers is dynamic",
            "rotary_emb.rope_type['full_attention'] = 'default'",
        ),
    ],
    ids=["longrope", "dynamic", "dynamic-in-some-layers"],
)
def test_frequencies_that_follow_the_longest_request_are_refused(model, kind, advice):
    with pytest.raises(ValueError, match="whose frequencies follow the longest request of a step") as caught:
        attention_layers(model())
    assert str(caught.value).startswith(f"model: the rope type {kind}")
    assert advice in str(caught.value)


def test_a_decoder_whose_positions_begin_behind_the_padding_token_is_refused():
    shape = {name: size for name, size in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(is_decoder=True, **shape)).eval()
    with pytest.raises(ValueError, match=r"RobertaForCausalLM counts positions from 2, .* padding_idx \+ 1"):
        attention_layers(model)


def test_a_decoder_in_a_larger_model_whose_positions_begin_behind_the_padding_token_is_refused():
    """Sinusoids, which are no parameter, of Kosmos-2.5."""
    text = {"embed_dim": 32, "ffn_dim": 32, "layers": 1, "attention_heads": 2, "vocab_size": 64}
    sizes = ("hidden_size", "patch_embed_hidden_size", "intermediate_size")
    vision = {**dict.fromkeys(sizes, 32), "head_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Kosmos2_5Config(text_config=text, vision_config=vision)
    model = transformers.Kosmos2_5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="Kosmos2_5ForConditionalGeneration counts positions from 2"):
        attention_layers(model)


def test_embeddings_that_follow_the_masks_of_the_row_are_refused():
    """ESM-2 as published."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    said = {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "position_embedding_type": "rotary"}
    model = transformers.EsmForMaskedLM(transformers.EsmConfig(**shape, **said, token_dropout=True)).eval()
    with pytest.raises(ValueError, match=r"^model: esm\.embeddings scales its embeddings by how many .* are masks"):
        attention_layers(model)
    model.esm.embeddings.token_dropout = False
    assert [layer.attn_type.name for layer in attention_layers(model)] == ["ENCODER_ONLY"]


def test_the_models_in_a_model_have_their_implementations_afterwards():
    parts = {
        "text_config": transformers.LlamaConfig(**SHAPE),
        "vision_config": transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
    }
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts)).eval()
    found = {"text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(found)

    def now():
        return [model.config._attn_implementation, *(getattr(model.config, n)._attn_implementation for n in found)]

    before = now()
    with using_attncore(model):
        assert set(now()) == {"attncore"}
    assert now() == before
    assert before[1:] == ["eager", "sdpa"]


def test_a_model_that_attends_by_another_implementation_is_refused():
    """It would run, neither read nor write the caches, and be right for prompts alone."""
    rows = Rows(decoder(next(iter(DECODERS))))
    rows.add("a", 3)
    rows({"a": [1, 2, 3]})
    metadata = rows.builder.last_metadata
    rows.model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"attend by 'sdpa'.*call model\.set_attn_implementation\('attncore'\)"):
        with attncore_context(metadata, rows.caches):
            pytest.fail("the context was entered")


@pytest.mark.parametrize("ask", [attention_layers, select_for_model, recurrent_layers, use_latent_caches])
@pytest.mark.parametrize("kind", ["None", "configuration", "class"])
def test_what_is_no_model_is_named(ask, kind):
    model = decoder("llama")
    given = {"None": None, "configuration": model.config, "class": type(model)}[kind]
    with pytest.raises(TypeError, match=r"^model: (a|the class) \w+ found; give a model of transformers"):
        ask(given)


@pytest.mark.parametrize("ask", [attention_layers, select_for_model])
def test_a_module_without_a_configuration_is_named(ask):
    with pytest.raises(TypeError, match=r"^model: 'Linear' has no config; give a model of transformers"):
        ask(torch.nn.Linear(2, 2))
