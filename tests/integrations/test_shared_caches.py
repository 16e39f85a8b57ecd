"""Layers that attend over the keys of a layer before them (Gemma 3n) share its cache."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402

from attncore.integrations.transformers import attention_layers, paged_caches, select_for_model  # noqa: E402

FEW = {"num_blocks": 40, "max_num_batched_tokens": 16, "block_size": 8}


def gemma3n(**said):
    """Four layers, of which the last two attend over the keys of the first two."""
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        **{
            "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "hidden_size_per_layer_input": 8,
            "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 256, "num_kv_shared_layers": 2, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 4, "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            **said,
        },
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.normal_(std=0.3)
    return model


def prompts():
    return [[1, 2, 3], list(range(5, 40)), [7] * 11]


def places(caches):
    return [cache.data_ptr() for cache in caches.values()]


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_are_those_of_the_model_alone(captured, monkeypatch):
    model = gemma3n()
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    with graphs_on_cpu("auto", monkeypatch) as options:
        engine = Engine(model, **FEW, **(options if captured else {}))
        first, second, *last = places(engine.caches)
        assert (first != second, last) == (True, [first, second])
        assert engine.complete(prompts(), 12) == expected


def test_the_tokens_follow_the_cache_that_is_read(monkeypatch):
    """What the test above would not see if the last layers attended over something else."""
    from attncore.integrations.transformers.forward_pass import _Reader

    model, sound = gemma3n(), _Reader.forward
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    monkeypatch.setattr(
        _Reader,
        "forward",
        lambda self, query, key, value, cache, *more: sound(self, query, key, value, cache * 0.5, *more),
    )
    assert Engine(model, **FEW).complete(prompts(), 12) != expected


def test_layers_say_whose_keys_they_read():
    names = [layer.name for layer in attention_layers(gemma3n())]
    assert [layer.reads_cache_of for layer in attention_layers(gemma3n())] == [None, None, *names[:2]]
    assert {layer.reads_cache_of for layer in attention_layers(decoder("llama"))} == {None}


def test_layers_whose_maker_is_not_given_have_their_own():
    model = gemma3n()
    layers = attention_layers(model)
    backend = select_for_model(model, block_size=8).create()
    for given, count in ((layers[2:], 2), (layers[::-1], 4)):
        assert len(set(places(paged_caches(model, backend, 4, layers=given)))) == count


@pytest.mark.parametrize(("fields", "shared"), [({}, False), ({"kv_cache_dtype": "fp8_e4m3"}, True)])
def test_caches_of_their_own(fields, shared):
    """As asked for, and where each layer has scales."""
    model = gemma3n()
    caches = paged_caches(model, select_for_model(model, block_size=8, **fields).create(), 4, shared=shared)
    assert len(set(places(caches))) == 4


def test_layers_of_another_window_do_not_share():
    """A cache group whose window is the layer's gives blocks back that one with a wider window reads."""
    from attncore.integrations.transformers.model_layers import _Recorder

    model, same = gemma3n(), torch.zeros(1, 2, 8)
    recorder = _Recorder(model)
    for layer, window in enumerate((8, None, None, 8)):
        asked = {"is_causal": True, "sliding_window": window}
        recorder.attend(model.model.layers[layer].self_attn, torch.zeros(1, 4, 8), same, same, asked)
    first, second, *_ = recorder.layers
    assert [layer.reads_cache_of for layer in recorder.layers.values()] == [None, None, second, first]


def test_a_compiled_engine_tells_its_layers_apart():
    model = gemma3n()
    expected = [greedy(model, prompt, 4) for prompt in prompts()]
    engine = Engine(model, **FEW, compile={"backend": "eager"})
    assert len(set(places(engine.caches))) == 4
    assert engine.complete(prompts(), 4) == expected
