"""What aiter and flash-attn are handed: by keyword, with what they need, and never what they get wrong."""

import contextlib
import math
import types

import pytest
import rocm_standins as standins
import torch

from attncore import CacheWriter
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
)
from attncore.builder.fields import ARRAYS
from attncore.dense import dense_attention
from attncore.testing.engines.adopting_builder import AdoptingEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.given_caches import FORMS, pair_of_views
from attncore.testing.engines.reading_engine import WRITERS, ReadingEngine
from attncore.testing.engines.run_batches import run_batch

MIXED = [(0, 20), (17, 3), (40, 1), (15, 1)]
PROMPTS = [(0, 20), (0, 5), (40, 1), (15, 1)]
DECODES = [(1, 1), (40, 1), (31, 1), (16, 1)]
LAYERS = {
    "aiter": [{}, {"sliding_window": 9}, {"logits_soft_cap": 2.0}, {"alibi_slopes": (0.5, 0.25, 0.1, 1.0)},
              {"sinks": (0.5, -1.0, 2.0, 0.0)}],
    "aiter_paged": [{}, {"logits_soft_cap": 2.0}, {"alibi_slopes": (0.5, 0.25, 0.1, 1.0)}],
    "ck": [{}, {"sliding_window": 9}, {"logits_soft_cap": 2.0}, {"alibi_slopes": (0.5, 0.25, 0.1, 1.0)}],
}  # fmt: skip
CASES = [
    pytest.param(variant, layer, layout, id="-".join((variant, layout, *layer)))
    for variant, layers in LAYERS.items()
    for layer in layers
    for layout in (("NHD", "HND") if not layer else ("NHD",))
]


@pytest.mark.parametrize(("variant", "layer", "layout"), CASES)
def test_steps_of_any_kind_are_right(variant, layer, layout, monkeypatch):
    """Whichever kernels a step goes to: the kit's engine compares it with dense attention."""
    library = standins.install(monkeypatch, variant)
    backend = standins.backend(variant, kv_cache_layout=layout)
    for batch in (MIXED, PROMPTS, DECODES):
        run_batch(Engine(backend, **layer), batch)
    assert library.calls


@pytest.mark.parametrize("written_by", WRITERS)
@pytest.mark.parametrize("variant", LAYERS)
def test_layers_that_attend_without_writing(variant, written_by, monkeypatch):
    standins.install(monkeypatch, variant)
    backend = standins.backend(variant)
    for batch in (MIXED, PROMPTS, DECODES):
        run_batch(ReadingEngine(backend, written_by=written_by, nan=written_by == "write_cache"), batch)


@pytest.mark.parametrize("variant", LAYERS)
def test_adopted_steps_whose_table_is_a_part_of_a_wider_one(variant, monkeypatch):
    standins.install(monkeypatch, variant)
    engine = AdoptingEngine(standins.backend(variant))
    for name, context in (("a", 3), ("b", 16), ("c", 33)):
        engine.add(name, context + 20)
    engine.fill({"a": 3, "b": 16, "c": 33})
    for scheduled in ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 5, "c": 1}):
        engine.step(scheduled)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("variant", LAYERS)
def test_chunks_of_the_list_builder_attend_without_writing(variant, nan, monkeypatch):
    """Prompts with context have a table: what is given of their keys is not read, and may be None."""
    standins.install(monkeypatch, variant)
    engine = ReadingEngine(standins.backend(variant), written_by="write_cache", nan=nan)
    for name, context in enumerate((3, 16, 2)):
        engine.add(name, context + 7)
        engine.fill({name: context})
    engine.list_step({0: 5, 1: 2}, {2: 1})
    engine.list_step({0: 1}, {2: 1}, hit=True)


@pytest.mark.parametrize("contexts", [(3, 0), (0, 0)], ids=["beside a chunk", "alone"])
@pytest.mark.parametrize("variant", [*LAYERS, "sdpa"])
def test_plain_prompts_of_the_list_builder_bring_their_keys(variant, contexts, monkeypatch):
    standins.install(monkeypatch, "aiter" if variant == "sdpa" else variant)
    backend = standins.backend(variant)
    groups = [SequenceGroup(True, [Sequence(row, 2, context, [1 + row])]) for row, context in enumerate(contexts)]
    metadata = CommonMetadataBuilder(16, chunked_prefill=any(contexts), backend=backend).build(groups)
    impl, kv_cache = backend.impl("0", scale=0.125), backend.allocate_kv_cache(4)
    received = metadata_from_fields(metadata.asdict_zerocopy(), backend)
    for step in (metadata, metadata.prefill_metadata, received):
        for name, key in (("key", None), ("value", torch.zeros(4, 2, 64).bfloat16())):
            with pytest.raises(ValueError, match=f"^{name}: None found"):
                impl.forward(torch.zeros(4, 4, 64).bfloat16(), key, None, kv_cache, step, write=False)


@pytest.mark.parametrize("variant", [*LAYERS, "sdpa"])
def test_tokens_that_a_window_of_the_list_builder_left_out_are_read_where_they_are_given(variant, monkeypatch):
    """A chunk behind a context has a table, and tokens of which no slot holds the key."""
    standins.install(monkeypatch, "aiter" if variant == "sdpa" else variant)
    backend, context, count, window = standins.backend(variant), 3, 20, 5
    if "sliding_window" not in backend.spec.features:
        pytest.skip("it takes no window")
    query, key, value = (torch.randn(context + count, heads, 64).bfloat16() for heads in (4, 2, 2))
    impl, kv_cache = backend.impl("0", scale=0.125, sliding_window=window), backend.allocate_kv_cache(4)
    for view, rows in zip(backend.kv_cache_views(kv_cache), (key, value), strict=True):
        view.fill_(2.0)
        view[1, :context] = rows[:context]
    builder = CommonMetadataBuilder(16, sliding_window=window, chunked_prefill=True, backend=backend)
    metadata = builder.build([SequenceGroup(True, [Sequence(0, count, context, [1, 2])])])
    assert metadata.slot_mapping.tolist()[: count - window - context] == [-1] * (count - window - context)
    query, new = query[context:], (key[context:], value[context:])
    impl.write_cache(*new, kv_cache, metadata)
    expected = dense_attention(query, key, value, scale=0.125, sliding_window=window)
    for step in (metadata, metadata.prefill_metadata, metadata_from_fields(metadata.asdict_zerocopy(), backend)):
        output = impl.forward(query, *new, kv_cache, step, write=False)
        torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
        with pytest.raises(ValueError, match=r"^key: None found"):
            impl.forward(query, None, None, kv_cache, step, write=False)


@pytest.mark.parametrize("context", [0, 5])
def test_a_decode_of_the_list_builder_whose_row_shows_its_own_key_alone_finds_it_in_the_cache(context, monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("sdpa", block_size=1)
    impl, kv_cache = backend.impl("0", scale=0.125, sliding_window=1), backend.allocate_kv_cache(8)
    builder = CommonMetadataBuilder(1, sliding_window=1, backend=backend)
    metadata = builder.build([SequenceGroup(False, [Sequence(0, 1, context, [*range(1, 7)])])])
    key, value = torch.randn(2, 1, 2, 64).bfloat16()
    impl.write_cache(key, value, kv_cache, metadata)
    output = impl.forward(torch.zeros(1, 4, 64).bfloat16(), None, None, kv_cache, metadata, write=False)
    torch.testing.assert_close(output, value.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", ["aiter", "ck"])
def test_a_pair_of_views(variant, form, monkeypatch):
    standins.install(monkeypatch, variant)
    for layout in ("NHD", "HND"):
        for batch in (MIXED, DECODES):
            run_batch(Engine(standins.backend(variant, kv_cache_layout=layout), cache=pair_of_views(form)), batch)


@pytest.mark.parametrize("variant", LAYERS)
def test_the_list_builder_and_padding(variant, monkeypatch):
    standins.install(monkeypatch, variant)
    engine = Engine(standins.backend(variant))
    for name, context in (("a", 3), ("b", 16), ("c", 33), ("d", 0)):
        engine.add(name, context + 20)
    engine.fill({"a": 3, "b": 16, "c": 33})
    engine.step({"a": 1, "b": 1}, extra=3)
    engine.step({"a": 1, "b": 1, "c": 1}, pad_reqs=2, pad_tokens=2)
    engine.list_step({"d": 7}, {"a": 1, "b": 1})
    engine.list_step({}, {"a": 1, "c": 1}, pad=2)
    engine.list_step({"d": 3}, {}, profiling=True)


def test_unified_attention_is_given_the_whole_step(monkeypatch):
    library = standins.install(monkeypatch, "aiter")
    engine = Engine(standins.backend("aiter"), sliding_window=9)
    library.calls.clear()
    run_batch(engine, MIXED)
    call = library.calls[-1]
    assert len(library.calls) == 2  # contexts, then the step
    assert (call["max_seqlen_q"], call["max_seqlen_k"], call["window_size"]) == (20, 41, (8, 0))
    assert sorted(call["seqused_k"].tolist()[:2]) == [16, 41]  # decodes first
    assert sorted(call["cu_seqlens_q"].diff().tolist()) == [1, 1, 3, 20]
    assert call["k"].shape[1:] == (16, 2, 64)
    assert not engine.backend.launcher.calls


def test_prompts_of_the_list_builder_do_not_go_to_aiter(monkeypatch):
    """They may have no block table."""
    library = standins.install(monkeypatch, "aiter")
    engine = Engine(standins.backend("aiter"))
    engine.add("a", 20)
    library.calls.clear()
    engine.list_step({"a": 5}, {})
    assert not library.calls
    assert len(engine.backend.launcher.calls) == 1


def test_aiters_paged_kernel_is_given_decodes_of_one_token(monkeypatch):
    library = standins.install(monkeypatch, "aiter_paged")
    engine = Engine(standins.backend("aiter_paged"))
    run_batch(engine, MIXED)
    call = library.calls[-1]
    assert sorted(call["context_lens"].tolist()) == [16, 41]
    assert call["query"].shape == (2, 4, 64)
    assert (call["kv_cache_layout"], call["partition_size"]) == ("NHD", 256)
    before = len(library.calls)
    engine.list_step({}, {2: 3})  # drafts
    assert len(library.calls) == before


def test_ck_is_given_whole_prompts_and_no_block_table(monkeypatch):
    library = standins.install(monkeypatch, "ck")
    engine = Engine(standins.backend("ck"), sliding_window=9)
    run_batch(engine, PROMPTS)
    call = library.calls[-1]
    assert "block_table" not in call
    assert call["cu_seqlens_q"].tolist() == [0, 20, 25]
    assert call["window_size"] == (8, 0)
    before, own = len(library.calls), len(engine.backend.launcher.calls)
    run_batch(Engine(engine.backend), MIXED)  # a chunk behind a context: the plugin's own kernels take the step
    assert len(library.calls) == before + 1  # its contexts were prompts
    assert len(engine.backend.launcher.calls) == own + 1


def _given(backend, tokens=3):
    config = backend.config
    query = torch.zeros(tokens, config.num_heads, config.head_size, dtype=torch.bfloat16)
    key = torch.zeros(tokens, config.num_kv_heads, config.head_size, dtype=torch.bfloat16)
    metadata = types.SimpleNamespace(host=None, num_tokens=tokens)  # as far as it is looked at before it is attended
    return {"query": query, "key": key, "value": key, "kv_cache": backend.allocate_kv_cache(4), "metadata": metadata}


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [
        ("query", torch.zeros(3, 4, 32, dtype=torch.bfloat16), "expected (tokens, 4, 64)"),
        ("query", torch.zeros(3, 4, 64), "the backend was made for bfloat16"),
        ("key", torch.zeros(3, 4, 64, dtype=torch.bfloat16), "expected (tokens, 2, 64)"),
        ("value", torch.zeros(3, 2, 64), "torch.float32 on cpu found; query is torch.bfloat16"),
        ("value", torch.zeros(3, 64, 2, dtype=torch.bfloat16).transpose(1, 2), "contiguous in the last dimension"),
        ("kv_cache", torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16), "a pair of views (blocks, 16, 2, 64)"),
        ("output", torch.zeros(2, 4, 64, dtype=torch.bfloat16), "length 2 found for 3 of query"),
        ("query", torch.zeros(2, 4, 64, dtype=torch.bfloat16), "length 2 found; the metadata has 3"),
        ("value", torch.zeros(2, 2, 64, dtype=torch.bfloat16), "length 2 found; the metadata has 3"),
    ],
)
def test_wrong_tensors_are_named(name, wrong, why, monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("aiter")
    impl = backend.impl("layers.0", scale=1.0)
    before = {key: part for key, part in _given(backend).items() if key != name}
    with pytest.raises(ValueError) as caught:
        impl.forward(**before, **{name: wrong})
    assert str(caught.value).startswith(("query:" if "made for" in why else f"{name}:",))
    assert why in str(caught.value)


def _beyond(tensor):
    """The tensor after a ``resize_`` that torch refused, whose shape reaches beyond its memory."""
    with contextlib.suppress(RuntimeError):
        tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize("variant", ["aiter", "sdpa"])
@pytest.mark.parametrize("name", ["query", "key", "value", "output", "kv_cache"])
@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (torch.Tensor.to_sparse, "layout torch.sparse_coo"),
        (_beyond, "reaches beyond the tensor's memory"),
        (torch.Tensor._neg_view, "a lazy negative"),
        (lambda tensor: "x", "str found"),
    ],
    ids=["sparse", "beyond its memory", "lazy negative", "no tensor"],
)
@pytest.mark.parametrize("known", [False, True])
def test_tensors_that_kernels_cannot_read_by_address(known, spoilt, why, name, variant, monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend(variant)
    impl, given = backend.impl("layers.0", scale=1.0), _given(backend)
    given["output"] = torch.zeros_like(given["query"])
    given["value"] = given["key"].clone()
    if known:  # formats of tensors of the same shapes
        impl.checked(**given)
    kv_cache = given["kv_cache"].clone()
    given[name] = spoilt(given[name].clone())
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*{why}"):
        impl.forward(**given)
    if name != "kv_cache":
        assert torch.equal(given["kv_cache"], kv_cache)


@pytest.mark.parametrize(
    ("variant", "method"), [("aiter", "forward"), ("aiter", "forward_with_lse"), ("sdpa", "forward")]
)
def test_whether_to_write_is_a_flag(variant, method, monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend(variant)
    impl, given = backend.impl("layers.0", scale=1.0), _given(backend)
    with pytest.raises(TypeError, match=r"^write: 'no' is not True or False"):
        getattr(impl, method)(**given, write="no")


@pytest.mark.parametrize("variant", ["aiter", "sdpa"])
@pytest.mark.parametrize(
    ("order", "says"),
    [
        (("metadata", "query", "key", "value", "kv_cache"), "query: SimpleNamespace found; give the step's queries"),
        (("query", "key", "value", "metadata", "kv_cache"), "metadata: Tensor found; give the step's metadata"),
    ],
)
def test_arguments_in_another_order(order, says, variant, monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend(variant)
    impl, given = backend.impl("layers.0", scale=1.0), _given(backend)
    with pytest.raises(TypeError, match=f"^{says}.*value, kv_cache, metadata"):
        impl.forward(*(given[name] for name in order))


def test_scales_of_a_cache_that_has_none(monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("triton")
    with pytest.raises(ValueError, match=r"k_scale: 0.5 given for a cache of auto; only an fp8 cache has scales"):
        backend.impl("layers.0", scale=1.0, k_scale=0.5)


def test_a_kernel_asked_for_after_the_choice(monkeypatch):
    standins.install(monkeypatch, "aiter")
    with pytest.raises(ValueError, match=r"options: kernel 'sdpa' is asked for now, but 'triton' was chosen before"):
        standins.backend("triton", options={"kernel": "sdpa"})


class _Properties:
    gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815
    multi_processor_count = 304


def test_the_architecture_that_torch_tells(monkeypatch):
    from attn_rocm import base

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)
    assert base.architecture("cuda:0") == ("gfx942", 304)
    monkeypatch.setattr(_Properties, "gcnArchName", "gfx1030")
    with pytest.raises(ValueError, match="device: cuda:0 is a gfx1030; supported: gfx908, gfx90a"):
        base.architecture("cuda:0")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_that_is_no_gpu(device, monkeypatch):
    from attn_rocm import base

    monkeypatch.delenv("ATTNCORE_ROCM_DEV_DEVICE", raising=False)
    with pytest.raises(ValueError, match=f"device: {device} is no GPU; supported: gfx908, .*, sm_75 and later"):
        base.architecture(device)


def test_the_scale_of_nothing_is_right():
    """The constants by which the kernels compute in powers of two."""
    from attn_rocm import launch

    assert math.isclose(2**launch.LOG2E, math.e)


@pytest.mark.parametrize("variant", LAYERS)
def test_a_step_of_requests_that_have_context_needs_the_cache(variant, monkeypatch):
    """Without it the context would be left out in silence. A step of no tokens needs none, nor do whole prompts."""
    library = standins.install(monkeypatch, variant)
    backend = standins.backend(variant)
    impl, size = backend.impl("layers.0", scale=1.0), backend.config.block_size
    batch = InputBatch(max_num_reqs=2, max_model_len=2 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)

    def given(tokens):
        heads = backend.config.num_heads, backend.config.num_kv_heads, backend.config.num_kv_heads
        dtype = getattr(torch, backend.config.dtype)
        return [torch.zeros(tokens, one, backend.config.head_size, dtype=dtype) for one in heads]

    assert impl.forward(*given(0), None, builder.build()).shape[0] == 0
    called = len(library.calls)
    assert not impl.forward(*given(3), backend.allocate_kv_cache(4), builder.build()).any()  # tensors of padding alone
    assert len(library.calls) == called
    batch.add_request("a", [1, 2])
    assert impl.forward(*given(3), None, builder.build({"a": 3})).shape[0] == 3
    with pytest.raises(ValueError, match="kv_cache: None found; a step of requests that have context needs"):
        impl.forward(*given(1), None, builder.build({"a": 1}))


@pytest.mark.parametrize("variant", LAYERS)
def test_a_step_of_the_declared_fields_alone(variant, monkeypatch):
    """As it comes from another rank: views of it are taken without the others."""
    standins.install(monkeypatch, variant)
    backend = standins.backend(variant)
    impl, size, config = backend.impl("layers.0", scale=1.0), backend.config.block_size, backend.config
    kv_cache = backend.allocate_kv_cache(8)
    batch = InputBatch(max_num_reqs=2, max_model_len=2 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1, 2])
    batch.add_request("b", [3, 4])
    for scheduled in ({"a": 3, "b": 2}, {"a": 1, "b": 2}, {}):
        metadata = builder.build(scheduled)
        others = set(ARRAYS) - backend.spec.host_needs - backend.spec.device_needs
        arrived = metadata_from_fields(metadata.asdict_zerocopy(skip_fields=others & set(dir(metadata))), backend)
        heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        tensors = [torch.randn(metadata.num_tokens, one, config.head_size).bfloat16() for one in heads]
        expected = impl.forward(*tensors, kv_cache, metadata)
        torch.testing.assert_close(impl.forward(*tensors, kv_cache, arrived), expected)


def test_torchs_kernels_compute_in_the_models_dtype_inside_autocast(monkeypatch):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("sdpa", dtype="float32")
    impl, kv_cache = backend.impl("layers.0", scale=1.0), backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=1, max_model_len=16, block_size=16)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 5})
    tensors = [torch.randn(5, heads, 64) for heads in (4, 2, 2)]
    expected = impl.forward(*tensors, kv_cache, metadata)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(impl.forward(*tensors, kv_cache, metadata), expected)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("variant", LAYERS)
def test_decodes_of_a_profiling_run_have_no_table(variant, cached, monkeypatch):
    """Those of the list builder: each attends to its own key, also where a cache is given, which is not written to."""
    standins.install(monkeypatch, variant)
    backend = standins.backend(variant)
    groups = [SequenceGroup(True, [Sequence(0, 3, 0, None)]), SequenceGroup(False, [Sequence(1, 1, 5, None)])]
    metadata = CommonMetadataBuilder(16, "rocm", backend=backend).build(groups)
    impl, kv_cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(8)
    given = [torch.randn(4, heads, backend.config.head_size).bfloat16() for heads in (4, 2, 2)]
    found = impl.forward(*given, kv_cache if cached else None, metadata)
    for mine in (slice(0, 3), slice(3, 4)):
        expected = dense_attention(*(part[mine].float() for part in given), scale=0.25)
        torch.testing.assert_close(found[mine].float(), expected, atol=3e-2, rtol=3e-2)
    assert not torch.stack(backend.kv_cache_views(kv_cache)).any()


def decode_step(backend):
    """A step of the sixth token of a request in block 1, and its tensors."""
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=16)
    batch.add_request("a", [1], 5)
    given = [torch.randn(1, heads, backend.config.head_size).bfloat16() for heads in (4, 2, 2)]
    return MetadataBuilder(batch, backend, max_num_batched_tokens=8).build(), given


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", [0, 1])
def test_a_layer_that_was_interrupted_while_it_took_a_cache(monkeypatch, then):
    """It writes to the cache that it is given next, and reads that."""
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("sdpa")
    impl, another = (backend.impl(f"layers.{index}", scale=1.0) for index in range(2))
    (metadata, given), caches = decode_step(backend), [backend.allocate_kv_cache(4) for _ in range(2)]
    for cache in caches:
        for view in backend.kv_cache_views(cache):
            view.normal_()
    impl.forward(*given, caches[0], metadata)
    with monkeypatch.context() as patched:
        patched.setattr(CacheWriter, "into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            impl.forward(*given, caches[1], metadata)
    expected = another.forward(*given, caches[then].clone(), metadata)
    assert torch.equal(impl.forward(*given, caches[then], metadata), expected)
    assert torch.equal(backend.kv_cache_views(caches[then])[0][1, 5], given[1][0])


@pytest.mark.parametrize("kind", [list, type("Pair", (list,), {})])
def test_a_list_whose_tensors_are_exchanged(monkeypatch, kind):
    standins.install(monkeypatch, "aiter")
    backend = standins.backend("sdpa")
    impl, another = (backend.impl(f"layers.{index}", scale=1.0) for index in range(2))
    metadata, new = decode_step(backend)
    given = kind(backend.kv_cache_views(backend.allocate_kv_cache(4)))
    for step in range(3):
        given[:] = [part.clone() for part in given]  # in place, as an engine that exchanges them
        for part in given:
            part.normal_()
        expected = another.forward(*new, tuple(part.clone() for part in given), metadata)
        assert torch.equal(impl.forward(*new, given, metadata), expected), step
