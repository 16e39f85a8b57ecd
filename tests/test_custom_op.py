"""``attncore::attention``: the numbers of the layer's own forward, compiled without a break, found by its context."""

import threading

import pytest

torch = pytest.importorskip("torch")

import attncore  # noqa: E402
from attncore import BackendConfig, InputBatch, KVCacheGroup, MetadataBuilder  # noqa: E402
from attncore.ops.forward_context import ForwardContext, here  # noqa: E402
from attncore.reference import ReferenceBackend  # noqa: E402


@pytest.fixture
def step():
    """A backend, two layers, a cache each, one step of a prompt of five tokens."""
    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", 16))
    impls = {"a": backend.impl("a", scale=0.3), "b": backend.impl("b", scale=0.3, sliding_window=2)}
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16)
    batch.add_request("r", [1, 2], 0)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build({"r": 5})
    torch.manual_seed(0)
    tensors = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    return backend, impls, metadata, tensors


def model(query, key, value, caches):
    first = attncore.attention(query * 1, key, value, caches[0], layer_name="a")
    return attncore.attention(first, key, value, caches[1], layer_name="b") + 1


@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_the_layers_forward(step, compiled):
    backend, impls, metadata, (query, key, value) = step
    expected_caches = [backend.allocate_kv_cache(8) for _ in impls]
    first = impls["a"].forward(query, key, value, expected_caches[0], metadata)
    expected = impls["b"].forward(first, key, value, expected_caches[1], metadata) + 1
    caches = [backend.allocate_kv_cache(8) for _ in impls]
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.inference_mode(), attncore.forward_context(metadata, impls):
        torch.testing.assert_close(run(query, key, value, caches), expected)
    for found, wanted in zip(caches, expected_caches, strict=True):
        assert torch.equal(found, wanted)
        assert found.any()


def test_the_schema_says_what_is_written(step):
    backend, impls, metadata, (query, key, value) = step
    args = (query, key, value, [backend.allocate_kv_cache(8)], torch.empty_like(query), "a")
    with attncore.forward_context(metadata, impls):
        torch.library.opcheck(torch.ops.attncore.attention.default, args)


def test_output_and_pairs_and_no_cache(step):
    backend, impls, metadata, (query, key, value) = step
    caches = backend.allocate_kv_cache(8)
    pair = caches[0].clone(), caches[1].clone()
    output = torch.full_like(query, torch.nan)
    with attncore.forward_context(metadata, impls):
        expected = attncore.attention(query, key, value, caches, layer_name="a")
        assert attncore.attention(query, key, value, pair, layer_name="a", output=output) is output
    assert torch.equal(output, expected)
    assert torch.equal(pair[0], caches[0])
    seen = []

    class Sees:
        def forward(self, *args):
            seen.append(args[3])

    with attncore.forward_context(metadata, {"a": Sees()}):
        found = attncore.attention(query, key, value, None, layer_name="a", head_size_v=4)
        for size, why in ((-1, "-1 is below 1"), (0, "0 is below 1"), ("4", "'4' is not an integer")):
            with pytest.raises((ValueError, TypeError), match=f"^head_size_v: {why}"):
                attncore.attention(query, key, value, None, layer_name="a", head_size_v=size)
    assert seen == [None]
    assert found.shape == (5, 4, 4)


@pytest.mark.parametrize("name", ["query", "key", "value", "kv_cache", "half", "output"])
def test_tensors_of_which_one_is_on_the_meta_device_are_refused(step, name):
    """torch then calls what it has for fake tensors, which computes nothing."""
    backend, impls, metadata, (query, key, value) = step
    whole = backend.allocate_kv_cache(8)
    given = {"query": query, "key": key, "value": value, "kv_cache": whole, "output": torch.zeros_like(query)}
    if name == "half":
        name, given["kv_cache"] = "kv_cache", (whole[0], whole[1].to("meta"))
    else:
        given[name] = given[name].to("meta")
    said = "key: on cpu, but the query is on meta" if name == "query" else f"{name}: on meta, but the query is on cpu"
    with attncore.forward_context(metadata, impls), pytest.raises(ValueError, match=f"^{said}"):
        attncore.attention(**given, layer_name="a")
    assert not whole.any()


def test_layers_of_several_groups_find_their_own_metadata(step):
    backend, _, _, (query, key, value) = step
    batch = InputBatch(
        max_num_reqs=4,
        max_model_len=64,
        groups=[KVCacheGroup("full", 16), KVCacheGroup("window", 16, sliding_window=2)],
    )
    batch.add_request("r", {"full": [1, 2], "window": [3, 4]}, 0)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=64).build({"r": 5})
    seen = {}

    class Sees:
        def __init__(self, name):
            self.name = name

        def forward(self, *args):
            seen[self.name] = args[4].group

    by_layer = {"a": metadata.groups["full"], "b": metadata.groups["window"]}
    with attncore.forward_context(by_layer, {name: Sees(name) for name in "abc"}):
        model(query, key, value, [backend.allocate_kv_cache(8)] * 2)
        with pytest.raises(KeyError, match="'c' has no metadata"):
            attncore.attention(query, key, value, None, layer_name="c")
    assert seen == {"a": "full", "b": "window"}


def test_outside_a_context_and_in_the_wrong_one(step):
    _, impls, metadata, (query, key, value) = step
    with pytest.raises(RuntimeError, match=r"layer 'a' ran outside a forward context; run the model inside"):
        attncore.attention(query, key, value, None, layer_name="a")
    with attncore.forward_context(metadata, impls):
        with pytest.raises(KeyError, match=r"'z' is not in this forward context; its layers: a, b"):
            attncore.attention(query, key, value, None, layer_name="z")


@pytest.mark.parametrize("given", [None, []], ids=str)
def test_a_context_without_a_mapping_of_layers_is_refused_where_it_is_made(step, given):
    with pytest.raises(TypeError, match=r"^impls: (NoneType|list) found; give a mapping of a layer's name to its"):
        attncore.forward_context(step[2], given)


def test_without_a_name_the_cache_says_which_layer(step):
    """As in models of transformers that are compiled."""
    backend, impls, metadata, (query, key, value) = step
    caches = {name: backend.allocate_kv_cache(8) for name in impls}
    found = torch.empty_like(query)
    context = ForwardContext(metadata, impls, {cache.data_ptr(): name for name, cache in caches.items()})
    with context:
        torch.ops.attncore.attention(query, key, value, [caches["b"]], found, "")
        assert torch.equal(found, attncore.attention(query, key, value, caches["b"], layer_name="b"))
        for cache in ([], [backend.allocate_kv_cache(8)]):
            with pytest.raises(KeyError, match="none given, and the cache is no layer's of this forward context"):
                torch.ops.attncore.attention(query, key, value, cache, found, "")
        for name in ("", None):  # of an engine whose layer has lost its name
            with pytest.raises(ValueError, match=r"^layer_name: ('')?(None)? found; give the layer's name in the"):
                attncore.attention(query, key, value, caches["b"], layer_name=name)


def test_a_context_inside_itself_is_left_twice(step):
    _, impls, metadata, (query, key, value) = step
    context = attncore.forward_context(metadata, impls)
    with context, context:
        pass
    with pytest.raises(RuntimeError, match="ran outside a forward context"):
        attncore.attention(query, key, value, None, layer_name="a")


def test_contexts_that_are_not_nested_are_told_and_the_inner_one_goes_on(step):
    """As of two generators that each wait within one."""
    _, impls, metadata, _ = step
    other = attncore.forward_context(metadata, {"other": impls["a"]})
    first, second = attncore.forward_context(metadata, impls), attncore.forward_context(metadata, impls)
    with other:
        first.__enter__()
        second.__enter__()
        with pytest.raises(RuntimeError, match="left before one that was entered in it"):
            first.__exit__(None, None, None)
        assert here.context is second
        second.__exit__(None, None, None)
        assert here.context is other
    assert here.context is None


def test_contexts_nest_and_threads_see_their_own(step):
    _, impls, metadata, (query, key, value) = step
    errors = []

    class Fails:
        def forward(self, *args):
            raise ValueError("inner")

    def elsewhere():
        try:
            attncore.attention(query, key, value, None, layer_name="a")
        except RuntimeError as error:
            errors.append(str(error))

    with attncore.forward_context(metadata, impls):
        with pytest.raises(ValueError, match="inner"), attncore.forward_context(metadata, {"a": Fails()}):
            attncore.attention(query, key, value, None, layer_name="a")
        cache = impls["a"].backend.allocate_kv_cache(8)
        attncore.attention(query, key, value, cache, layer_name="a")  # the outer one is back
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(errors) == 1
    with pytest.raises(RuntimeError):
        attncore.attention(query, key, value, None, layer_name="a")


def test_one_context_in_two_threads_gives_each_its_own_outer_one(step):
    _, impls, metadata, (query, key, value) = step
    outer, shared = (attncore.forward_context(metadata, {name: impls["a"]}) for name in ("outer", "shared"))
    entered, leave, said = threading.Event(), threading.Event(), []

    def ask():
        with pytest.raises((KeyError, RuntimeError)) as caught:
            attncore.attention(query, key, value, None, layer_name="none")
        said.append(str(caught.value))

    def elsewhere():
        with shared:
            entered.set()
            leave.wait(60)
        ask()

    thread = threading.Thread(target=elsewhere)
    with outer:
        with shared:
            thread.start()
            entered.wait(60)
        ask()  # while the other thread, which came later, is still inside
        leave.set()
        thread.join()
    assert "its layers: outer" in said[0]
    assert "ran outside a forward context" in said[1]


def _parts(kind, cache):
    """A cache as engines may give it: whole, in halves of separate storage, or in views of one."""
    kinds = {
        "whole": lambda: cache,
        "separate": lambda: (cache[0].clone(), cache[1].clone()),
        "halves": lambda: (cache[0], cache[1]),
        "one view": lambda: torch.stack([cache, cache])[1],
    }
    return kinds[kind]()


@pytest.mark.parametrize("given", ["whole", "separate"])
def test_compiled_for_all_shapes_it_takes_caches_of_own_storage(step, given):
    backend, impls, metadata, (query, key, value) = step
    run = torch.compile(attncore.attention, dynamic=True, backend="aot_eager", fullgraph=True)
    with attncore.forward_context(metadata, impls):
        expected = attncore.attention(query, key, value, backend.allocate_kv_cache(8), layer_name="a")
        cache = _parts(given, backend.allocate_kv_cache(8))
        torch.testing.assert_close(run(query, key, value, cache, layer_name="a"), expected)


@pytest.mark.parametrize("given", ["halves", "one view"])
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_for_all_shapes_it_refuses_views_at_an_offset(step, given, inside):
    """Inductor gives the operator other memory, and writes it back over the cache: torch 2.13, even without write."""
    backend, impls, metadata, (query, _, _) = step
    cache = backend.allocate_kv_cache(8).normal_()
    before = cache.clone()

    def attend(query, cache):
        parts = _parts(given, cache) if inside else cache
        return attncore.attention(query, None, None, parts, layer_name="a", write=False)

    run = torch.compile(attend, dynamic=True, backend="aot_eager")
    with attncore.forward_context(metadata, impls):
        with pytest.raises(RuntimeError, match=r"symbolic offset found.*give the whole cache as one tensor"):
            run(query, cache if inside else _parts(given, cache))
    assert torch.equal(cache, before)
