"""What the libraries' functions are called with, for steps of every kind; outputs are the kit's business."""

from __future__ import annotations

from typing import Any

import flash_standin as standin
import pytest
import torch
from attn_flash.backend import FlashBackend
from attn_flash.spec import make_spec

import attncore
from attncore import AttentionRequest, BackendConfig, Host
from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder, Sequence, SequenceGroup
from attncore.testing.engines.engine import Engine


@pytest.fixture(params=["2", "4"])
def generation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def library(generation: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = standin.Generation2() if generation == "2" else standin.Generation4()
    return standin.install(monkeypatch, generation, made)


@pytest.fixture
def backend(library: Any, generation: str) -> Any:
    return standin.create(generation)


def run(
    backend: Any, contexts: dict[str, int], scheduled: dict[str, int], *, with_lse: bool = False, **features: Any
) -> Any:
    """One step, over contexts computed before; the calls of the step alone are left in the library."""
    engine = Engine(backend, with_lse=with_lse, **features)
    for name, count in scheduled.items():
        engine.add(name, contexts.get(name, 0) + count)
    engine.fill({name: context for name, context in contexts.items() if context})
    backend._library.calls.clear()
    engine.step(scheduled)
    return backend._library.calls


def test_decodes_are_one_call_over_the_cache(backend: Any, generation: str) -> None:
    size = standin.BLOCK[generation]
    [(entry, given)] = run(backend, {"a": 3, "b": size}, {"a": 1, "b": 1})
    assert entry == ("with_kvcache" if generation == "2" else "varlen")
    assert given["q"].shape == (2, 1, 4, 16)
    table, lengths = ("block_table", "cache_seqlens") if generation == "2" else ("page_table", "seqused_k")
    assert given[lengths].tolist() == [4, size + 1]
    if generation == "2":
        assert given[table].shape[1] == 2  # no wider than the longest needs: splits are made by the width
    else:
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (1, 2 * size)  # until the block is full


def test_decodes_of_several_tokens_are_rows_of_that_length(backend: Any) -> None:
    engine = Engine(backend)
    for name in "ab":
        engine.add(name, 9)
    engine.fill({"a": 3, "b": 5})
    backend._library.calls.clear()
    engine.list_step({}, {"a": 3, "b": 3})
    [(_, given)] = backend._library.calls
    assert given["q"].shape == (2, 3, 4, 16)


def test_decodes_of_different_lengths_go_by_their_starts(backend: Any) -> None:
    engine = Engine(backend)
    for name in "ab":
        engine.add(name, 9)
    engine.fill({"a": 3, "b": 5})
    backend._library.calls.clear()
    engine.list_step({}, {"a": 3, "b": 1})
    [(_, given)] = backend._library.calls
    assert given["cu_seqlens_q"].tolist() == [0, 3, 4]


def test_prompts_attend_over_this_step_s_keys(backend: Any) -> None:
    [(entry, given)] = run(backend, {}, {"a": 5, "b": 3})
    assert entry == "varlen"
    assert given["k"].shape == (8, 2, 16)
    assert given["cu_seqlens_q"].tolist() == given["cu_seqlens_k"].tolist() == [0, 5, 8]
    assert given["max_seqlen_k"] == 5


def test_chunks_attend_over_the_cache(backend: Any, generation: str) -> None:
    [(entry, given)] = run(backend, {"a": 7}, {"a": 5, "b": 3})
    assert entry == "varlen"
    assert given["k"].shape[1:] == (standin.BLOCK[generation], 2, 16)
    assert given["cu_seqlens_q"].tolist() == [0, 5, 8]
    if generation == "2":
        assert given["cu_seqlens_k"].tolist() == [0, 12, 15]
    else:
        assert given["seqused_k"].tolist() == [12, 3]


def test_a_mixed_step(backend: Any, generation: str) -> None:
    """Generation 2 reads a decode's keys once for a group of heads in its decode function only."""
    calls = run(backend, {"a": 7, "c": 4}, {"a": 5, "b": 3, "c": 1})
    assert [entry for entry, _ in calls] == (["varlen", "with_kvcache"] if generation == "2" else ["varlen"])
    if generation == "2":
        assert calls[0][1]["cu_seqlens_q"].tolist() in ([1, 6, 9], [1, 4, 9])  # of the whole step's tokens
        assert len(calls[0][1]["q"]) == 9
        assert calls[1][1]["cache_seqlens"].tolist() == [5]


def test_plain_prompts_beside_decodes_of_the_list_builder(backend: Any) -> None:
    engine = Engine(backend)
    for name, tokens in (("a", 6), ("b", 9)):
        engine.add(name, tokens)
    engine.fill({"b": 8})
    backend._library.calls.clear()
    engine.list_step({"a": 6}, {"b": 1})
    (_, prompts), (_, decodes) = backend._library.calls
    assert prompts["cu_seqlens_k"].tolist() == [0, 6]
    assert decodes["q"].shape == (1, 1, 4, 16)


def test_prompts_with_and_without_a_table_in_one_step_of_the_list_builder(backend: Any) -> None:
    """A prefix hit has its whole table, a prompt beside it an empty row, which nobody may read."""
    size = backend.config.block_size
    groups = [
        SequenceGroup(True, [Sequence(0, 5, 0, [3])], False),
        SequenceGroup(True, [Sequence(1, 4, size, [1, 2])], True),
        SequenceGroup(True, [Sequence(2, 2, 0, [4])], False),
    ]
    metadata = CommonMetadataBuilder(size, "common", backend=backend).build(groups)
    impl = backend.impl("layers.0", scale=0.25)
    tensors = [torch.randn(11, heads, 16).bfloat16() for heads in (4, 2, 2)]
    found = impl.forward(*tensors, backend.allocate_kv_cache(8), metadata)
    assert not found.isnan().any()
    paged = [given.get("block_table", given.get("page_table")) is not None for _, given in backend._library.calls]
    assert paged == [False, True, False]


def test_a_window_is_the_tokens_to_the_left(backend: Any, generation: str) -> None:
    [(_, given)] = run(backend, {"a": 20}, {"a": 1}, sliding_window=6)
    assert given["window_size"] == (5, 0)
    [(_, given)] = run(backend, {"a": 20}, {"a": 1})
    assert given["window_size"] == ((-1, -1) if generation == "2" else (None, None))


def test_features_are_passed_as_the_library_wants_them(backend: Any, generation: str) -> None:
    extra: dict[str, Any] = {"alibi_slopes": (0.5, 0.25, 0.125, 2.0)} if generation == "2" else {"sinks": (1.0,) * 4}
    [(_, given)] = run(backend, {"a": 20}, {"a": 1}, logits_soft_cap=30.0, scale=0.5, **extra)
    assert (given["softcap"], given["softmax_scale"], given["causal"]) == (30.0, 0.5, True)
    per_head = given["alibi_slopes"] if generation == "2" else given["learnable_sink"]
    assert (per_head.dtype, per_head.tolist()) == (torch.float32, list(next(iter(extra.values()))))


@pytest.mark.parametrize("generation", ["2"])
def test_a_decode_function_that_waits_is_not_called(backend: Any, library: Any) -> None:
    object.__setattr__(backend.probed, "synchronises", True)
    library.waits = True
    for with_lse in (False, True):
        [(entry, given)] = run(backend, {"a": 3, "b": 300}, {"a": 1, "b": 1}, with_lse=with_lse)
        assert entry == "varlen"
        assert given["cu_seqlens_k"].tolist() == [0, 4, 305]
        assert given["max_seqlen_q"] == (2 if with_lse else 1)  # 1 splits long contexts, and has another log-sum-exp
    calls = run(backend, {"a": 300, "b": 5}, {"a": 1, "b": 4, "c": 2})
    assert [entry for entry, _ in calls] == ["varlen", "varlen"]
    assert calls[1][1]["cu_seqlens_q"].tolist() == [0, 1]


def test_a_captured_size_has_the_largest_bounds(backend: Any, generation: str) -> None:
    size = standin.BLOCK[generation]
    batch = InputBatch(max_num_reqs=4, max_model_len=4 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, decode_threshold=3)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(16)
    for tokens in (1, 3):
        metadata = builder.capture(4 if tokens == 1 else 2, tokens)
        rows = metadata.num_tokens
        backend._library.calls.clear()
        impl.forward(*(torch.zeros(rows, heads, 16).bfloat16() for heads in (4, 2, 2)), cache, metadata)
        [(_, given)] = backend._library.calls
        if generation == "2" or tokens == 1:
            assert given["q"].shape[1] == tokens
        else:  # rows may be shorter
            assert given["cu_seqlens_q"] is metadata.query_start_loc
        if generation == "2":
            assert given["block_table"].shape[1] == 4
        else:
            assert given["max_seqlen_k"] == 4 * size


def test_manager_blocks_of_512_are_expanded_to_256(library: Any, generation: str) -> None:
    backend = standin.create(generation, block_size=256, manager_block_size=512)
    batch = InputBatch(max_num_reqs=2, max_model_len=2048, groups=[KVCacheGroup("all", 512, kernel_block_size=256)])
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=2048)
    batch.add_request("a", {"all": [2, 1]})
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(8)
    tensors = [torch.randn(700, heads, 16).bfloat16() for heads in (4, 2, 2)]
    impl.forward(*tensors, cache, builder.build({"a": 700}))
    key_cache = backend.kv_cache_views(cache)[0]
    stored = torch.cat([key_cache[block] for block in (4, 5, 2)])[:700]
    assert torch.equal(stored, tensors[1])
    library.calls.clear()
    impl.forward(*(tensor[:1] for tensor in tensors), cache, builder.build())
    [(_, given)] = library.calls
    assert given.get("block_table", given.get("page_table"))[0, :3].tolist() == [4, 5, 2]


def test_output_is_filled_and_padding_is_0(backend: Any) -> None:
    engine = Engine(backend)
    engine.add("a", 4)
    metadata = engine.builder.build({"a": 4})
    tensors = [torch.randn(6, heads, 16).bfloat16() for heads in (4, 2, 2)]
    for output in (None, torch.full((6, 4, 16), float("nan")).bfloat16()):
        found = engine.impl.forward(*tensors, engine.kv_cache, wrapped(backend, metadata), output)
        assert output is None or found is output
        assert found.shape == (6, 4, 16)
        assert not found[:4].isnan().any()
        assert not found[4:].any()


def wrapped(backend: Any, step: Any) -> Any:
    from attncore.testing.engines import steps_on_device as steps

    return steps.planned(backend, step)


def test_a_step_without_tokens(backend: Any) -> None:
    engine = Engine(backend)
    metadata = wrapped(backend, engine.builder.build())
    found = engine.impl.forward(
        *(torch.randn(2, heads, 16).bfloat16() for heads in (4, 2, 2)), engine.kv_cache, metadata
    )
    assert found.shape == (2, 4, 16)
    assert not found.any()


def test_caches_that_another_backend_made_are_read(backend: Any) -> None:
    size, other = backend.config.block_size, []
    for shape in ((2, 5, size, 2, 16), (5, 2, size, 2, 16)):
        cache = torch.randn(shape).bfloat16()
        keys, values = backend.kv_cache_views(cache)
        assert keys.shape == values.shape == (5, size, 2, 16)
        other.append((cache[0, 3], keys[3]) if shape[0] == 2 else (cache[3, 0], keys[3]))
    assert all(torch.equal(one, two) for one, two in other)
    pair = torch.randn(5, size, 2, 16).bfloat16(), torch.randn(5, size, 2, 16).bfloat16()
    assert backend.kv_cache_views(pair)[1].data_ptr() == pair[1].data_ptr()


def test_bad_input_is_refused_with_a_sentence(backend: Any, generation: str) -> None:
    engine = Engine(backend)
    engine.add("a", 4)
    engine.fill({"a": 3})
    metadata = wrapped(backend, engine.builder.build())
    tensors = [torch.randn(1, heads, 16).bfloat16() for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="kv_cache: None found; a step of requests that have context"):
        engine.impl.forward(*tensors, None, metadata)
    with pytest.raises(
        ValueError, match=r"kv_cache: shape \(2, 3, 7, 2, 16\) found for layout NHD; expected the tensor that"
    ):
        engine.impl.forward(*tensors, torch.zeros(2, 3, 7, 2, 16), metadata)
    other = "4" if generation == "2" else "2"
    choice = attncore.select(
        AttentionRequest(num_heads=4, num_kv_heads=2, head_size=16, dtype="bfloat16", backend="flash"),
        host=Host.assume("sm_90", packages=standin.packages(generation)),
    )
    with pytest.raises(ValueError, match=f"options: generation '{other}' is not the one that was chosen"):
        choice.create(device="cpu", options={"generation": other})


def test_tensors_shorter_than_the_metadata_reach_no_kernel(backend: Any) -> None:
    engine = Engine(backend)
    engine.add("a", 4)
    metadata = wrapped(backend, engine.builder.build({"a": 4}))
    given = [torch.randn(4, heads, 16).bfloat16() for heads in (4, 2, 2)]
    encodes = backend.impl("layers.1", scale=0.25, attn_type="encoder_only")
    backend._library.calls.clear()  # those of the engine, which looks how the cache lies
    for impl, cache in ((engine.impl, engine.kv_cache), (engine.impl, None), (encodes, None)):
        for index, name in enumerate(("query", "key", "value")):
            short = [tensor[:3] if index == one else tensor for one, tensor in enumerate(given)]
            with pytest.raises(ValueError, match=rf"{name}: shape \(3, .*\) found; the metadata has 4"):
                impl.forward(*short, cache, metadata)
    assert not backend._library.calls


def test_a_variant_that_there_is_not_is_refused() -> None:
    known = "fa3, fa3_vllm, fa4, fa2, fa3_latent and fa3_vllm_latent"
    with pytest.raises(ValueError, match=f"variant: 'fa1' found; flash has {known}"):
        FlashBackend(BackendConfig(4, 2, 16, "bfloat16", 256, variant="fa1", spec=make_spec()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 16}, "block_size: 16 found; flash's variant fa2 accepts multiples of 256"),
        ({"variant": "fa4", "block_size": 8}, "block_size: 8 found; flash's variant fa4 accepts multiples of 16"),
        ({"head_size": 12}, "head_size: 12 found; flash's variant fa2 accepts multiples of 8 up to 256"),
        ({"head_size_v": 8}, "head_size_v: 8 found; flash's variant fa2 accepts the same as head_size, 16"),
        ({"use_mla": True, "num_kv_heads": 1}, "use_mla: True found"),
        ({"dtype": "float32"}, "dtype: float32 found; flash's variant fa2 accepts bfloat16, float16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: fp8_e4m3 found; flash's variant fa2 accepts auto"),
    ],
    ids=str,
)
def test_a_configuration_past_the_negotiation_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16", "block_size": 256}
    with pytest.raises(ValueError) as caught:
        FlashBackend(BackendConfig(**{**fields, "variant": "fa2", "spec": make_spec(), **changes}))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float16"}, "dtype: float16: over an fp8 cache its output is bfloat16"),
        ({"head_size": 24}, "head_size: 24: over an fp8 cache it takes multiples of 16"),
    ],
    ids=str,
)
def test_an_fp8_cache_that_generation_3_does_not_read(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(monkeypatch, "3", standin.MADE["3"]())
    fields = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16", "block_size": 16, "variant": "fa3",
        "kv_cache_dtype": "fp8_e4m3", "spec": make_spec(),
    }  # fmt: skip
    FlashBackend(BackendConfig(**fields))
    with pytest.raises(ValueError, match=f"^{says}"):
        FlashBackend(BackendConfig(**{**fields, **changes}))


@pytest.mark.parametrize("generation", ["4"])
def test_a_head_size_that_is_wrong_without_a_causal_mask(backend: Any, generation: str) -> None:
    """A cross layer past the negotiation is refused; a shared prefix is not read apart."""
    of_96 = standin.create(generation, head_size=96)
    with pytest.raises(ValueError, match="attn_type: variant fa4 reads an encoder's keys of head size 96 wrong"):
        of_96.impl("layers.0", scale=1.0, attn_type="encoder_decoder")
    of_96.impl("layers.0", scale=1.0, attn_type="encoder")
    assert of_96.cascade(None) is None
    backend.impl("layers.0", scale=1.0, attn_type="encoder_decoder")


@pytest.mark.parametrize("generation", ["2"])
def test_what_a_build_leaves_out_is_refused_by_name(backend: Any) -> None:
    lacks = {"logits_soft_cap": "no softcap", "alibi": "no alibi", "head_size 16": "left out"}
    object.__setattr__(backend.probed, "lacks", lacks)
    with pytest.raises(ValueError, match="logits_soft_cap: logits_soft_cap was left out of this build"):
        backend.impl("layers.0", scale=1.0, logits_soft_cap=5.0)
    with pytest.raises(ValueError, match="alibi_slopes: alibi was left out of this build"):
        backend.impl("layers.0", scale=1.0, alibi_slopes=[1.0] * 4)


def test_sinks_that_the_kernel_does_not_take_are_refused_with_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer past the negotiation: of too many heads, and of a build without them."""
    standin.install(monkeypatch, "3_vllm", standin.Generation3())
    wide, usual = standin.create("3_vllm", num_heads=128), standin.create("3_vllm")
    with pytest.raises(ValueError, match="sinks: num_heads 128 found; with sinks generation 3 takes 64 at most"):
        wide.impl("layers.0", scale=1.0, sinks=[0.0] * 128)
    wide.impl("layers.0", scale=1.0)
    object.__setattr__(usual.probed, "lacks", {"sinks": "no sinks"})
    with pytest.raises(ValueError, match="sinks: sinks was left out of this build"):
        usual.impl("layers.0", scale=1.0, sinks=[0.0] * 4)


def test_a_windowed_chunk_whose_early_tokens_have_no_slot_is_refused(backend: Any) -> None:
    size = backend.config.block_size
    builder = CommonMetadataBuilder(size, sliding_window=4, chunked_prefill=True, backend=backend)
    metadata = builder.build([SequenceGroup(True, [Sequence(0, 12, 2, [1, 2])])])
    impl = backend.impl("layers.0", scale=0.25, sliding_window=4)
    tensors = [torch.randn(12, heads, 16).bfloat16() for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="metadata: a windowed prompt with context has tokens without a slot"):
        impl.forward(*tensors, backend.allocate_kv_cache(4), metadata)
