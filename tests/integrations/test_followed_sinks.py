"""Sinks are parameters of a model: layers attend by what is in them when a step runs, however that came there."""

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.models import decoder  # noqa: E402

from attncore.errors import CaptureError  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attention_layers,
    attncore_context,
    capture_between_attention,
    compile_layers,
    paged_caches,
    piecewise_graph,
)

POOL = {"num_blocks": 64, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
BEFORE = [list(range(3, 3 + length)) for length in (1, 5, 20)]
AFTER = [list(range(60, 60 + length)) for length in (1, 6, 24)]  # no prefix of them is kept from before


def in_place(model, other):
    model.load_state_dict(other.state_dict())


def through_data(model, other):
    """As loaders of weights do: a parameter's version does not count it."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)


def assigned(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)


def other_weights(dtype=torch.float32):
    model = decoder("gpt_oss", seed=1, dtype=dtype)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(3.0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("load", [in_place, through_data, assigned])
def test_an_engine_says_what_one_made_afterwards_says(load, dtype):
    model, other = decoder("gpt_oss", dtype=dtype), other_weights(dtype)
    engine = Engine(model, **POOL)
    first = engine.complete(BEFORE, 4)
    load(model, other)
    assert engine.complete(AFTER, 4) == Engine(other, **POOL).complete(AFTER, 4)
    load(model, decoder("gpt_oss", dtype=dtype))
    assert Engine(model, **POOL).complete(BEFORE, 4) == first


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize("load", [pytest.param(through_data, marks=pytest.mark.slow), assigned])
def test_so_do_compiled_layers(load):
    torch._dynamo.reset()
    model, other = decoder("gpt_oss", dtype=torch.bfloat16), other_weights(torch.bfloat16)
    engine = Engine(model, **POOL)
    compile_layers(model, engine.caches, backend="eager")
    engine.complete(BEFORE, 2)
    load(model, other)
    assert engine.complete(AFTER, 3) == Engine(other, **POOL).complete(AFTER, 3)
    torch._dynamo.reset()


@pytest.mark.parametrize("transport", ["copy", "graph"])
def test_so_do_captured_decodes(transport, monkeypatch):
    with graphs_on_cpu(transport, monkeypatch) as captured:
        model, other = decoder("gpt_oss"), other_weights()
        engine = Engine(model, **POOL, **captured)
        engine.complete(BEFORE, 4)
        through_data(model, other)
        found = engine.complete(AFTER, 4)
    assert found == Engine(other, **POOL).complete(AFTER, 4)


def test_only_layers_with_sinks_are_followed_and_their_tensors_stay():
    model = decoder("gpt_oss")
    engine = Engine(model, **POOL)
    held = [impl.sinks for impl in engine.caches.impls.values()]
    assigned(model, other_weights())
    engine.complete(BEFORE[:1], 1)
    assert all(impl.sinks is own for impl, own in zip(engine.caches.impls.values(), held, strict=True))
    assert [own.tolist() for own in held] == [[3.0] * 4] * 2
    assert not any(own.requires_grad for own in held)
    assert not Engine(decoder("llama"), **POOL).caches._sinks


@pytest.mark.parametrize(
    ("sinks", "text"),
    [
        (torch.nn.Parameter(torch.zeros(3)), "sinks: 3 given; the backend has 4 query heads"),
        (None, "its sinks are gone from where they were; make the caches anew"),
    ],
)
def test_other_sinks_than_the_heads_are_refused_by_the_layers_name(sinks, text):
    model = decoder("gpt_oss")
    caches = Engine(model, **POOL).caches
    model.model.layers[1].self_attn.sinks = sinks
    with (
        pytest.raises(ValueError, match=rf"^layer model\.layers\.1\.self_attn: {text}"),
        attncore_context(object(), caches),
    ):
        pass


class Halved(torch.nn.Module):
    def forward(self, sinks):
        return sinks / 2


def test_sinks_that_a_layer_makes_anew_are_those_that_it_passes():
    model = decoder("gpt_oss")
    for layer in model.model.layers:
        torch.nn.utils.parametrize.register_parametrization(layer.self_attn, "sinks", Halved())
    engine = Engine(model, **POOL)
    engine.complete(BEFORE, 2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.parametrizations.sinks.original.fill_(6.0)
    found, expected = engine.complete(AFTER, 4), Engine(model, **POOL).complete(AFTER, 4)
    assert found == expected
    assert engine.caches.impls["model.layers.0.self_attn"].sinks.tolist() == [3.0] * 4
    for what, call in (
        ("compile_layers", lambda: compile_layers(model, engine.caches, backend="eager")),
        ("capture_between_attention", lambda: capture_between_attention(lambda: None, engine.caches)),
    ):
        with pytest.raises(ValueError, match=rf"^{what}: the sinks of layer model\.layers\.0\.self_attn are no param"):
            call()


def test_layers_that_were_recorded_before_other_weights_are_followed_by_what_they_pass():
    model = decoder("gpt_oss")
    layers = attention_layers(model)
    backend = Engine(model, **POOL).backend
    assigned(model, other_weights())
    assert paged_caches(model, backend, 4, layers=layers)._passes_sinks == {layer.name for layer in layers}


class Graph:
    """Of what a capture holds: nothing."""

    def capture_begin(self, pool):
        pass

    capture_end = replay = lambda self: None


def test_attention_between_graphs_follows_what_is_written_and_refuses_other_tensors(monkeypatch):
    nothing = type("Stream", (), {"wait_stream": lambda *_: None})
    for name, made in {
        "CUDAGraph": Graph, "Stream": nothing, "current_stream": nothing, "stream": lambda _: nullcontext(),
        "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, made)
    model = decoder("gpt_oss")
    engine, ids = Engine(model, **POOL), torch.zeros((1, 8), dtype=torch.int64)
    graph = piecewise_graph.PiecewiseGraph(lambda: model(input_ids=ids, use_cache=False).logits, engine.caches, None)
    graph._capture()
    engine.batch.add_request(0, [1])
    engine.input_ids.give(0, [5, 6])
    metadata = engine.builder.build({0: 2})
    through_data(model, other_weights())
    graph.replay(metadata)
    assert engine.caches.impls["model.layers.1.self_attn"].sinks.tolist() == [3.0] * 4
    assigned(model, decoder("gpt_oss"))
    with pytest.raises(CaptureError, match=r"^replay: the model has other tensors as sinks"):
        graph.replay(metadata)


def test_sinks_of_another_number_name_their_layer():
    model = decoder("gpt_oss")
    engine = Engine(model, **POOL)
    model.model.layers[1].self_attn.sinks.data = torch.zeros(2, 2)
    request = engine.add_request([3, 4], 2)
    while request.error is None:
        engine.step()
    assert str(request.error).startswith("layer model.layers.1.self_attn: sinks: ")
