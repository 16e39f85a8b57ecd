"""Steps that move on without a build, and steps whose shared prefix is read once: compared with dense attention."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import flash_standin as standin
import pytest
import torch

from attncore import CacheWriter
from attncore.builder import (
    BatchSlice,
    CascadeRule,
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    context_chunk_metadata,
    context_chunks,
    local_attention_metadata,
    new_tokens_metadata,
    slice_metadata,
)
from attncore.dense import dense_attention

RULE = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)


@pytest.fixture(params=["2", "3_vllm", "4"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    standin.install(monkeypatch, request.param, standin.MADE[request.param]())
    return str(request.param)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, heads, 16).bfloat16() for heads in (4, 2, 2)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


def test_advance_step_over_the_edge_of_a_block(generation: str) -> None:
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(16)
    lengths, tables = [size - 2, 3], [[1], [2]]
    said: list[list[torch.Tensor]] = [[], []]
    prompts = [SequenceGroup(True, [Sequence(i, lengths[i], 0, tables[i])]) for i in range(2)]
    query, key, value = tensors(sum(lengths))
    impl.forward(query, key, value, cache, CommonMetadataBuilder(size, backend=backend).build(prompts))
    start = 0
    for i, length in enumerate(lengths):
        said[i] = [part[start : start + length].float() for part in (key, value)]
        start += length
    decodes = [SequenceGroup(False, [Sequence(i, 1, lengths[i], tables[i])]) for i in range(2)]
    metadata = CommonMetadataBuilder(size, backend=backend).build(decodes)
    for step in range(5):
        if step:
            for i in range(2):
                if (lengths[i] + step) % size == 0:
                    tables[i].append(3 + i)
            metadata.advance_step()
        query, key, value = tensors(2)
        found = impl.forward(query, key, value, cache, metadata)
        for i in range(2):
            said[i] = [torch.cat((old, new[i : i + 1].float())) for old, new in zip(said[i], (key, value), strict=True)]
            close(found[i : i + 1], dense_attention(query[i : i + 1].float(), *said[i], scale=0.25))


def test_a_cache_is_dropped_when_another_takes_its_place(generation: str) -> None:
    """Metadata lives as long as its builder, and so longer than a cache that an engine gives up and makes anew."""
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl = backend.impl("layers.0", scale=0.25)
    batch = InputBatch(max_num_reqs=2, max_model_len=size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    batch.add_request("a", [1])
    first, second = ([backend.allocate_kv_cache(4)] for _ in range(2))
    for _ in range(3):
        metadata = builder.build()
        for _ in range(2):  # by the long way, and by the short one
            impl.forward(*tensors(1), first[0], metadata)
    views = [weakref.ref(part) for part in impl._views]
    standin.forget_calls(backend)
    impl.forward(*tensors(1), second[0], metadata)
    first.clear()
    gc.collect()
    assert [view() for view in views] == [None, None]


@pytest.mark.parametrize("paired", [False, True])
def test_a_cache_that_is_given_other_memory(generation: str, paired: bool) -> None:
    """The same tensor, whose memory an engine has exchanged: its views of before show the old one."""
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(4)
    given = tuple(part.clone() for part in backend.kv_cache_views(cache)) if paired else cache
    batch = InputBatch(max_num_reqs=2, max_model_len=size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    batch.add_request("a", [1])
    said = [torch.zeros(0, 2, 16)] * 2
    for step in range(4):
        if step == 2:  # the values alone, of a pair
            part = given[1] if paired else given
            before = part.data
            part.data = before.clone()
            before.fill_(7.0)
        query, key, value = tensors(1)
        found = impl.forward(query, key, value, given, builder.build())
        said = [torch.cat((old, new.float())) for old, new in zip(said, (key, value), strict=True)]
        close(found, dense_attention(query.float(), *said, scale=0.25))
        for view, rows in zip(backend.kv_cache_views(given), said, strict=True):
            assert torch.equal(view[1, : step + 1].float(), rows)


@pytest.mark.parametrize("window", [None, 4])
def test_decodes_of_different_lengths_grow_within_a_block(generation: str, window: int | None) -> None:
    """What lies beside the metadata of one step bounds the lengths of the next in the same arena, too."""
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25, sliding_window=window), backend.allocate_kv_cache(8)
    batch = InputBatch(max_num_reqs=2, max_model_len=4 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, decode_threshold=3)
    batch.add_request("a", [1])
    batch.add_request("b", [2])
    said = [[torch.zeros(0, 2, 16)] * 2 for _ in range(2)]
    for _ in range(5):
        query, key, value = tensors(4)
        found = impl.forward(query, key, value, cache, builder.build({"a": 3, "b": 1}))
        for row, mine in enumerate((slice(0, 3), slice(3, 4))):
            said[row] = [torch.cat((old, new[mine].float())) for old, new in zip(said[row], (key, value), strict=True)]
            close(found[mine], dense_attention(query[mine].float(), *said[row], scale=0.25, sliding_window=window))


def test_a_prompt_in_block_0_beside_a_prefix_hit_of_the_list_builder(generation: str) -> None:
    """Its row of the table is empty, which is padded with 0, too."""
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(8)
    groups = [
        SequenceGroup(True, [Sequence(0, 4, size, [1, 2])], True),
        SequenceGroup(True, [Sequence(1, size + 4, 0, [0, 3])], False),
    ]
    metadata = CommonMetadataBuilder(size, "common", backend=backend).build(groups)
    given = tensors(size + 8)
    found = impl.forward(*given, cache, metadata)
    close(found[4:], dense_attention(*(tensor[4:].float() for tensor in given), scale=0.25))


@pytest.mark.parametrize("features", [{}, {"logits_soft_cap": 2.0}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
def test_a_cascade_gives_what_one_pass_gives(generation: str, features: dict[str, Any]) -> None:
    if "sinks" in features and generation == "2":
        pytest.skip("generation 2 has no sinks")
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25, **features), backend.allocate_kv_cache(32)
    batch = InputBatch(max_num_reqs=4, max_model_len=8 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16 * size)
    batch.add_request("a", [1, 2, 3])
    impl.forward(*tensors(2 * size), cache, builder.build({"a": 2 * size}))
    for name, own in (("b", 4), ("c", 5), ("d", 6)):
        shared = [1, 2] if name != "d" else []
        batch.add_request(name, [*shared, own, own + 10], num_computed_tokens=len(shared) * size)
    metadata = builder.build({"a": 1, "b": 3, "c": 2, "d": 4})
    cascade = backend.cascade(metadata, RULE)
    assert cascade is not None
    assert cascade.prefix.lengths.tolist() == [2 * size]
    given = tensors(metadata.num_tokens + 1)
    expected = impl.forward(*given, cache, metadata)
    close(impl.forward_cascade(*given, cache, metadata, cascade), expected)
    before = cache.clone()
    for key in (None, torch.full_like(given[1], torch.nan)):
        close(impl.forward_cascade(given[0], key, key, cache, metadata, cascade, write=False), expected)
        assert torch.equal(cache, before)
    assert backend.cascade(metadata, CascadeRule(min_requests=4)) is None


@pytest.mark.parametrize("chunked", [False, True])
def test_a_cascade_of_the_list_builder_reads_no_prompt_without_a_table(generation: str, chunked: bool) -> None:
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(8).normal_()
    builder = CommonMetadataBuilder(size, backend.list_layout, backend=backend, chunked_prefill=chunked)
    decodes = [SequenceGroup(False, [Sequence(row, 1, 2 * size + row, [1, 2, 3 + row])]) for row in (0, 1)]
    assert backend.cascade(builder.build([SequenceGroup(True, [Sequence(7, 4, 0, [5])]), *decodes]), RULE) is None
    for first in ([], [SequenceGroup(True, [Sequence(7, 4, size, [5, 6])], not chunked)]):
        metadata = builder.build([*first, *decodes])
        cascade, given = backend.cascade(metadata, RULE), tensors(metadata.num_tokens)
        assert cascade is not None
        expected = impl.forward(*given, cache, metadata)
        close(impl.forward_cascade(*given, cache, metadata, cascade), expected)


def test_a_captured_size_of_fewer_tokens_than_rows(generation: str) -> None:
    """One token for eight rows, say, whose longest query is that token."""
    if generation == "2":
        pytest.skip("generation 2 captures rows of one length")
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=8, max_model_len=size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    batch.add_request("a", [1])
    for tokens in (1, 2):
        builder.capture(8, num_tokens=tokens)
        query, key, value = tensors(tokens)
        batch.rollback("a", batch.num_computed_tokens("a"))
        found = impl.forward(query, key, value, cache, builder.build({"a": tokens}, bucket=(8, tokens)))
        close(found, dense_attention(query.float(), key.float(), value.float(), scale=0.25))


def test_a_step_built_overlapped_has_no_cascade(generation: str) -> None:
    """Its lengths on the host are upper bounds, and the passes would be made of them."""
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    batch = InputBatch(max_num_reqs=4, max_model_len=4 * size, block_size=size)
    rejected = torch.full((4,), 2, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, backend, max_num_batched_tokens=64, decode_threshold=3, transport="copy", num_rejected=rejected
    )
    for index in range(3):
        batch.add_request(index, [1, 2 + index], num_computed_tokens=size)
    for overlapped in (False, True):
        step = builder.build(query_len=3, overlapped=overlapped)
        view = slice_metadata(step, BatchSlice(0, 3, 0, 9))
        assert view.host_lengths == step.host_lengths == ("bounded" if overlapped else "exact")
        for one in (step, view):
            assert (backend.cascade(one, RULE) is None) == overlapped


@pytest.mark.parametrize("prompts", [0, 1])
def test_cross_attention_of_requests_none_of_which_has_encoder_input(generation: str, prompts: int) -> None:
    """Of either builder: a table that may have no column, and a longest length of 0."""
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25, attn_type="encoder_decoder"), backend.allocate_kv_cache(8)
    groups = [SequenceGroup(True, [Sequence(9, 3, 0, [3])], False, 0, [])] * prompts
    groups += [SequenceGroup(False, [Sequence(row, 1, 4, [1])], False, 0, []) for row in range(2)]
    listed = CommonMetadataBuilder(size, "flash", backend=backend, encoder_decoder=True).build(groups)
    kinds = [KVCacheGroup("self", size), KVCacheGroup("cross", size, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=4 * size, max_encoder_len=2 * size, groups=kinds)
    for row in range(3):
        batch.add_request(row, {"self": [1 + row], "cross": []}, encoder_seq_len=0)
    builder = MetadataBuilder(batch, {kind.name: backend for kind in kinds}, max_num_batched_tokens=64)
    kept = builder.build({0: 1 + 2 * prompts}).groups["cross"]
    for metadata in (listed, kept):
        query = tensors(metadata.num_tokens)[0]
        found, lse = impl.forward_with_lse(query, None, None, cache, metadata)
        assert not found.any()
        assert lse.isinf().all()


def test_a_layer_whose_queries_see_the_prefix_differently_has_no_cascade(generation: str) -> None:
    backend = standin.create(generation)
    impl = backend.impl("layers.0", scale=0.25, sliding_window=8)
    with pytest.raises(ValueError, match="cascade: this layer has a window"):
        impl.forward_cascade(*tensors(1), None, None, None)


@pytest.mark.parametrize("view", ["prefill_metadata", "decode_metadata"])
def test_views_of_a_mixed_step_of_the_list_builder_are_refused_by_a_cross_layer(generation: str, view: str) -> None:
    """They keep the whole step's encoder fields, whose first row is the prompt's."""
    backend, size = standin.create(generation), standin.BLOCK[generation]
    impl, cache = backend.impl("layers.0", scale=0.25, attn_type="encoder_decoder"), backend.allocate_kv_cache(8)
    prompt = SequenceGroup(True, [Sequence(0, 3, 0, [1])], encoder_seq_len=4, cross_block_table=[2])
    decode = SequenceGroup(False, [Sequence(1, 1, 2, [3])], encoder_seq_len=5, cross_block_table=[4])
    step = CommonMetadataBuilder(size, "flash", backend=backend, encoder_decoder=True).build([prompt, decode])
    query, key, value = tensors(4)
    for write in (True, False):
        with pytest.raises(ValueError, match=r"^metadata: encoder_seq_lens has 2 rows for 1 request; views of a mixed"):
            impl.forward(query, key, value, cache, getattr(step, view), write=write)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_rows_without_a_table_attend_to_what_is_given_beside_a_cache_too(
    generation: str, cached: bool, write: bool
) -> None:
    """The parts of a context in chunks: their slots are -1 and their tables have no columns, whatever the cache is."""
    torch.manual_seed(0)
    backend, size = standin.create(generation), standin.BLOCK[generation]
    own, across = backend.impl("0", scale=0.25), backend.impl("1", scale=0.25, attn_type="encoder_decoder")
    cache = backend.allocate_kv_cache(8) if cached else None
    batch = InputBatch(max_num_reqs=2, max_model_len=2 * size, block_size=size)
    batch.add_request("a", [1, 2], num_computed_tokens=3)
    batch.add_request("b", [3, 4], num_computed_tokens=6)
    prefills = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build({"a": 4, "b": 5}).prefill_metadata
    query, *new = tensors(9)
    found = own.forward(query, *new, cache, new_tokens_metadata(prefills), write=write)
    for mine in (slice(0, 4), slice(4, 9)):
        close(found[mine], dense_attention(*(part[mine].float() for part in (query, *new)), scale=0.25))
    chunks = context_chunks(prefills.host.block_table, prefills.host.context_lens, size, 2 * size)
    step = context_chunk_metadata(prefills, chunks, 0)
    given = tensors(step.num_encoder_tokens)[1:]
    found = across.forward(query, *given, cache, step, write=write)
    for mine, seen in ((slice(0, 4), slice(0, 3)), (slice(4, 9), slice(3, 9))):
        keys = (part[seen].float() for part in given)
        close(found[mine], dense_attention(query[mine].float(), *keys, scale=0.25, causal=False))


@pytest.mark.parametrize("cached", [True, False])
def test_decodes_of_a_profiling_run_have_no_table(generation: str, cached: bool) -> None:
    """Those of the list builder: each attends to its own key."""
    torch.manual_seed(0)
    backend, size = standin.create(generation), standin.BLOCK[generation]
    groups = [
        SequenceGroup(True, [Sequence(0, 3, 0, None)]),
        SequenceGroup(False, [Sequence(1, 1, 5, None)]),
    ]
    metadata = CommonMetadataBuilder(size, "flash", backend=backend).build(groups)
    given = tensors(4)
    found = backend.impl("0", scale=0.25).forward(*given, backend.allocate_kv_cache(8) if cached else None, metadata)
    for mine in (slice(0, 3), slice(3, 4)):
        close(found[mine], dense_attention(*(part[mine].float() for part in given), scale=0.25))


def decode_step(backend: Any, size: int) -> Any:
    """A step of the sixth token of a request in block 1."""
    batch = InputBatch(max_num_reqs=2, max_model_len=size, block_size=size)
    batch.add_request("a", [1], 5)
    return MetadataBuilder(batch, backend, max_num_batched_tokens=64).build()


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", [0, 1])
def test_a_layer_that_was_interrupted_while_it_took_a_cache(
    generation: str, monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    """It writes to the cache that it is given next, and reads that."""
    backend, given = standin.create(generation), tensors(1)
    impl, another = (backend.impl(f"layers.{index}", scale=0.25) for index in range(2))
    metadata, caches = decode_step(backend, standin.BLOCK[generation]), [backend.allocate_kv_cache(4) for _ in range(2)]
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
def test_a_list_whose_tensors_are_exchanged(generation: str, kind: Any) -> None:
    backend, new = standin.create(generation), tensors(1)
    impl, another = (backend.impl(f"layers.{index}", scale=0.25) for index in range(2))
    metadata = decode_step(backend, standin.BLOCK[generation])
    given = kind(backend.kv_cache_views(backend.allocate_kv_cache(4)))
    for step in range(3):
        given[:] = [part.clone() for part in given]  # in place, as an engine that exchanges them
        for part in given:
            part.normal_()
        expected = another.forward(*new, tuple(part.clone() for part in given), metadata)
        assert torch.equal(impl.forward(*new, given, metadata), expected), step


def test_a_rank_that_keeps_no_key_attends_over_none(generation: str) -> None:
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    batch = InputBatch(max_num_reqs=2, max_model_len=4 * size, block_size=2 * size)
    batch.add_request("a", [1], 2)
    whole = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    metadata = ContextParallel(2, 1, size, interleave=size).metadata(whole, backend)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(4)
    output, lse = impl.forward_with_lse(*tensors(1), cache, metadata)
    assert not output.any()
    assert lse.isinf().all()
    assert not cache.any()


def test_slopes_over_chunks_of_local_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes count from the first key of the row, which is not the first one of the request."""
    torch.manual_seed(0)
    standin.install(monkeypatch, "2", standin.Generation2())
    size, slopes = standin.BLOCK["2"], (0.5, 0.25, 0.125, 0.0625)
    backend = standin.create("2")
    impl, cache = backend.impl("layers.0", scale=0.25, alibi_slopes=slopes), backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=2 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=2 * size)
    batch.add_request("a", [1, 2])
    said = [torch.zeros(0, 2, 16)] * 2
    for count in (size - 2, 5, 1):  # across the edge of a chunk, and a decode behind it
        metadata = local_attention_metadata(builder.build({"a": count}), chunk_size=size, block_size=size)
        backend.plan(metadata)
        query, key, value = tensors(count)
        output, lse = impl.forward_with_lse(query, key, value, cache, metadata)
        said = [torch.cat((old, new.float())) for old, new in zip(said, (key, value), strict=True)]
        for index in range(count):
            place = len(said[0]) - count + index
            keys, values = (part[place // size * size : place + 1] for part in said)
            wanted = dense_attention(
                query[index : index + 1].float(), keys, values, scale=0.25, alibi_slopes=slopes, return_lse=True
            )
            close(output[index : index + 1], wanted[0])
            torch.testing.assert_close(lse[index : index + 1], wanted[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("with_lse", [False, True])
def test_decodes_without_keys_where_the_decode_function_waits(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    """They take the other function, which writes the logarithm of a row without keys outside of its tensor."""
    standin.install(monkeypatch, "2", standin.Generation2(waits=True))
    backend = standin.create("2")
    object.__setattr__(backend.probed, "synchronises", True)
    batch = InputBatch(
        max_num_reqs=2, max_model_len=512, max_encoder_len=512,
        groups=[KVCacheGroup("decoder", 256), KVCacheGroup("encoder", 256, cross=True)],
    )  # fmt: skip
    batch.add_request("a", {"decoder": [1], "encoder": []}, 3)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build().groups["encoder"]
    impl, cache = backend.impl("cross", scale=0.25, attn_type="encoder_decoder"), backend.allocate_kv_cache(4)
    query = tensors(1)[0]
    if with_lse:
        output, lse = impl.forward_with_lse(query, None, None, cache, metadata)
        assert lse.isinf().all()
    else:
        output = impl.forward(query, None, None, cache, metadata)
    assert not output.any()
    virtual = InputBatch(max_num_reqs=2, max_model_len=1024, block_size=512)
    virtual.add_request("a", [1], 2)
    whole = MetadataBuilder(virtual, max_num_batched_tokens=8).build()
    rank = ContextParallel(2, 1, 256, interleave=256).metadata(whole, backend)
    output, lse = backend.impl("layers.0", scale=0.25).forward_with_lse(*tensors(1), cache, rank)
    assert not output.any()
    assert lse.isinf().all()
