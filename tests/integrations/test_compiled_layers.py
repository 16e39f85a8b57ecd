"""compile_layers: each layer is one graph, made once, and says what the layer says that is not compiled."""

import gc
import weakref

import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.models import DECODERS, decoder, encoder  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers import DistilBertConfig, DistilBertModel  # noqa: E402

from attncore import InputBatch, MetadataBuilder  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    PagedCaches,
    attncore_context,
    compile_layers,
    compiled_layers,
    paged_caches,
    select_for_model,
)

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40, 20)]
POOL = {"num_blocks": 64, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def compiled_as_it_was(model, backend):
    """Tokens of an engine before its layers are compiled and afterwards, in steps of many lengths and of one token."""
    engine = Engine(model, **POOL)
    expected = engine.complete(PROMPTS, 6)
    engine = Engine(model, **POOL)  # none of its blocks is computed yet
    compile_layers(model, engine.caches, backend=backend)
    assert graphs() == 2
    assert engine.complete(PROMPTS, 6) == expected
    assert engine.complete(PROMPTS[1:2], 6) == expected[1:2]
    assert graphs() == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("size", ["num_blocks", "block_size"])
def test_a_cache_of_any_size_takes_two_graphs(size):
    """torch.compile takes a number of tokens that is also a size of the cache for that size."""
    engine = Engine(decoder("llama"), **POOL | {size: 7})
    compile_layers(engine.model, engine.caches, backend="eager")
    engine.complete([[1] * 5, [2] * 9], 3)
    assert graphs() == 2


SLOW = ("mistral", "qwen3", "mixtral")  # what is in them is in the others, too


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in DECODERS]
)
def test_a_compiled_model_says_the_same_and_is_not_compiled_again(name):
    """Windows, soft caps, sinks and experts; layers of several kinds of attention share the two graphs."""
    compiled_as_it_was(decoder(name, num_hidden_layers=3), "eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # which inductor calls
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma2", "gpt_oss"))]
)
def test_by_inductor(name):
    compiled_as_it_was(decoder(name), "inductor")


@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_an_engine_captures_its_decodes_over_compiled_layers(transport, monkeypatch):
    model = decoder("mistral")
    expected = Engine(model, **POOL).complete(PROMPTS, 6)
    with graphs_on_cpu(transport, monkeypatch) as captured:
        engine = Engine(model, compile={"backend": "eager"}, **POOL, **captured)
        assert sorted(engine.graphs) == [1, 2, 4]
        before = counters["stats"]["calls_captured"]
        assert graphs() == 2
        assert engine.complete(PROMPTS, 6) == expected
        assert (graphs(), counters["stats"]["calls_captured"]) == (2, before)
        engine.close()


def test_an_engine_compiles_for_the_threads_of_its_steps():
    model = decoder("llama")
    expected = Engine(model, **POOL).complete(PROMPTS, 3)
    engine = Engine(model, threads=2, compile={"backend": "eager"}, **POOL)
    assert engine.complete(PROMPTS, 3) == expected
    assert graphs() == 2


def test_each_context_has_its_own_caches_compiled_or_not():
    model = decoder("mistral")
    first, second, plain = (Engine(model, **POOL) for _ in range(3))
    expected = plain.complete(PROMPTS, 4)
    for engine in (first, second):
        compile_layers(model, engine.caches, backend="eager")
    made = counters["stats"]["unique_graphs"]
    third = Engine(model, **POOL)  # what the layers ask for is recorded again
    for engine in (first, third, second, plain):
        assert engine.complete(PROMPTS, 4) == expected
    assert graphs() == made
    caches = weakref.ref(first.caches)
    first.close()
    del first, engine
    gc.collect()
    assert caches() is None


def test_layers_that_share_a_cache_are_refused():
    """Compiled ones would all run as the last of them."""
    engine = Engine(decoder("gemma2"), **POOL)
    own = engine.caches
    shared = PagedCaches(own.impls, dict.fromkeys(own, next(iter(own.values()))), own._names)
    with pytest.raises(ValueError, match=r"^kv_caches: layers \S+\.0\S* and \S+ have one cache, by which compiled"):
        compile_layers(engine.model, shared, backend="eager")


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.8"), reason="torch 2.7 tells what a graph raises as a RuntimeError"
)
def test_a_backend_that_copies_caches_is_refused_and_the_model_runs_as_it_did():
    model = decoder("llama")
    caches = paged_caches(model, select_for_model(model, backend="reference").create("cpu"), num_blocks=4)
    with pytest.raises(ValueError, match=r"layer model.layers.0: \w+ cannot be compiled: .* copy of the cache"):
        compile_layers(model, caches, backend="aot_eager")
    assert not caches._compiled


def test_a_layer_that_cannot_be_compiled_is_named_with_the_reason():
    model = decoder("llama")
    engine = Engine(model, **POOL)
    expected = engine.complete(PROMPTS, 3)
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x) if x.sum() > torch.inf else inner(x) * 1
    with pytest.raises(
        ValueError, match=r"layer model\.layers\.1: LlamaDecoderLayer cannot .*Data-dependent branching"
    ):
        compile_layers(model, engine.caches, backend="eager")
    assert engine.complete(PROMPTS, 3) == expected
    mlp.forward = inner

    def refuses(graph, inputs):
        raise RuntimeError("no such kernel")

    with pytest.raises(ValueError, match=r"layer model\.layers\.0: LlamaDecoderLayer cannot .*no such kernel"):
        compile_layers(model, engine.caches, backend=refuses)


def test_layers_that_are_in_no_list():
    model = decoder("llama", num_hidden_layers=1)
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    engine = Engine(model, **POOL)
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.self_attn: it is in no list of layers"):
        compile_layers(model, engine.caches, backend="eager")


def distilbert():
    """More layers than torch compiles a function anew for, which are handed the positions that the model is given."""
    torch.manual_seed(0)
    return DistilBertModel(DistilBertConfig(dim=32, hidden_dim=32, n_layers=5, n_heads=2, vocab_size=64)).eval()


@pytest.mark.parametrize("made", [encoder, distilbert])
def test_layers_without_a_cache_keep_their_names(made):
    model, limit = made(), torch._dynamo.config.recompile_limit
    rows = [[5, 6, 7], [4], list(range(20, 31))]
    caches = paged_caches(model, select_for_model(model, block_size=8).create(), 4)
    backend = next(iter(caches.impls.values())).backend
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=8)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build_profile(len(row) for row in rows)
    model.set_attn_implementation("attncore")
    given = {
        "input_ids": torch.tensor([[token for row in rows for token in row]]),
        "position_ids": metadata.positions[None],
    }
    found = []
    for compiled in (False, True):
        if compiled:
            compile_layers(model, caches, backend="eager")
        with torch.inference_mode(), attncore_context(metadata, caches):
            found.append(model(**given).last_hidden_state)
    assert graphs() == 2 * len(caches)
    assert torch.equal(*found)
    with torch.inference_mode(), attncore_context(metadata, caches):  # a keyword that some hand on to their layers
        assert torch.equal(model(**given, use_cache=False).last_hidden_state, found[0])
    assert torch._dynamo.config.recompile_limit == limit, "as it was outside"


def tripled(module, given, output):
    return output * 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hooked", [[0], *(pytest.param(one, marks=pytest.mark.slow) for one in ([1], [0, 1]))])
def test_layers_that_share_a_graph_run_their_own_hooks(hooked, when):
    model = decoder("llama")
    engine = Engine(model, **POOL)

    def hook():
        for index in hooked:
            model.model.layers[index].self_attn.o_proj.register_forward_hook(tripled)

    if when == "before":
        hook()
    compile_layers(model, engine.caches, backend="eager")
    if when == "after":
        engine.complete(PROMPTS[:1], 2)
        hook()
    expected = Engine(model, **POOL).complete(PROMPTS[1:], 6)
    assert engine.complete(PROMPTS[1:], 6) == expected
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "as it was outside"


@pytest.mark.parametrize("fuse", [True, False])
def test_layers_are_compiled_again(fuse):
    model = decoder("llama")
    engine = Engine(model, **POOL)
    compile_layers(model, engine.caches, backend="eager", fuse=fuse)
    model.load_state_dict(decoder("llama", seed=5).state_dict(), assign=True)
    compile_layers(model, engine.caches, backend="eager", fuse=fuse)
    expected = Engine(model, **POOL).complete(PROMPTS, 6)
    assert engine.complete(PROMPTS, 6) == expected


def replaced_and_run(limit):
    """The tokens of a model that is given other weights when it is compiled, as often as torch allows, or more."""
    model = decoder("llama")
    engine = Engine(model, **POOL)
    compile_layers(model, engine.caches, backend="eager")
    model.load_state_dict(decoder("llama", seed=5).state_dict(), assign=True)
    with torch._dynamo.config.patch(recompile_limit=limit):
        said = engine.complete(PROMPTS[1:3], 2)
        assert torch._dynamo.config.recompile_limit == limit, "as it was outside"
    return said, Engine(model, **POOL).complete(PROMPTS[1:3], 2)


def test_layers_are_compiled_beyond_torchs_limit():
    # It is of a class of layers: by default 8, which several models in a process reach together.
    said, expected = replaced_and_run(limit=2)
    assert said == expected


def test_a_layer_that_is_compiled_without_end_is_named_with_the_limit(monkeypatch):
    monkeypatch.setattr(compiled_layers, "_MOST_GRAPHS", 0)
    with pytest.raises(ValueError, match=r"layer model.layers.0: .* cannot be compiled: .*recompile_limit"):
        replaced_and_run(limit=1)
