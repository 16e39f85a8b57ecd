"""Ranks that share each request's keys: every rank's part by reference, merged to attention over all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import BackendConfig, CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.builder import ContextParallel, local_attention_metadata
from attncore.dense import dense_attention
from attncore.merge import merge_attention
from attncore.reference import ReferenceBackend

SIZES = {
    "plain": {"num_kv_heads": 2, "head_size": 8},
    "latent": {"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True},
}


def make_backend(block_size, sizes="plain"):
    return ReferenceBackend(BackendConfig(num_heads=4, dtype="float32", block_size=block_size, **SIZES[sizes]))


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 3),
    interleave=st.integers(1, 3),
    runs=st.integers(1, 3),
    requests=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 17]), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    sizes=st.sampled_from(list(SIZES)),
    by_builder=st.booleans(),
    seed=st.integers(0, 100),
)
def test_parts_merge_to_the_whole(world, interleave, runs, requests, sizes, by_builder, seed):
    """Four steps of requests; ``requests[i][s]`` is how many tokens request i runs in step s."""
    torch.manual_seed(seed)
    block_size = interleave * runs
    ranks = [ContextParallel(world, rank, block_size, interleave) for rank in range(world)]
    backend = make_backend(block_size, sizes)
    impl, latent = backend.impl("layer", scale=0.3), backend.config.use_mla
    caches = [backend.allocate_kv_cache(200).fill_(torch.nan) for _ in ranks]
    batches = [InputBatch(max_num_reqs=4, max_model_len=80, block_size=block_size * world) for _ in ranks]
    builders = []
    for rank, batch in zip(ranks, batches, strict=True):
        builders.append(
            MetadataBuilder(batch, backend, max_num_batched_tokens=80, context_parallel=rank)
            if by_builder and world > 1
            else MetadataBuilder(batch, max_num_batched_tokens=80)
        )
        free = iter(range(1, 200))
        for name, counts in enumerate(requests):
            batch.add_request(name, [next(free) for _ in range(-(-max(1, sum(counts)) // (block_size * world)))])
    said = {}
    for step in range(4):
        scheduled = {name: counts[step] for name, counts in enumerate(requests)}
        steps = [builder.build(scheduled) for builder in builders]
        total, config = steps[0].num_tokens, backend.config
        query, key = torch.randn(total, 4, config.head_size), torch.randn(total, config.num_kv_heads, config.head_size)
        value = key[..., :8] if latent else torch.randn(total, 2, 8)
        expected = torch.zeros(total, 4, 8)
        for row, name in enumerate(steps[0].req_ids):
            tokens = slice(*steps[0].host.query_start_loc[row : row + 2])
            old = said.get(name, (key[:0], value[:0]))
            said[name] = torch.cat((old[0], key[tokens])), torch.cat((old[1], value[tokens]))
            expected[tokens] = dense_attention(query[tokens], *said[name], scale=0.3)
        parts = []
        for rank, metadata, cache in zip(ranks, steps, caches, strict=True):
            mine = metadata if by_builder and world > 1 else rank.metadata(metadata, backend)
            parts.append(impl.forward_with_lse(query, key, None if latent else value, cache, mine))
        merged, _ = merge_attention(*zip(*parts, strict=True))
        torch.testing.assert_close(merged, expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def shared_step():
    """A decode after 9 tokens whose key rank 1 keeps, on rank 0."""
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=8)
    batch.add_request("a", [1, 2], num_computed_tokens=9)
    return ContextParallel(2, 0, 4).metadata(MetadataBuilder(batch, max_num_batched_tokens=8).build(), make_backend(4))


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 4), ("alibi_slopes", [0.5] * 4)])
def test_distances_among_a_part_of_the_keys_are_refused(shared_step, name, value):
    assert shared_step.host.slot_mapping.tolist() == [-1]
    backend = make_backend(4)
    cache = backend.allocate_kv_cache(4)
    impl = backend.impl("layer", scale=0.3, **{name: value})
    with pytest.raises(ValueError, match=f"^metadata: row 0 holds a rank's part of its keys, but the layer has {name}"):
        impl.forward(torch.zeros(1, 4, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache, shared_step)
    assert not cache.any()


def test_a_part_of_the_keys_needs_a_cache(shared_step):
    impl = make_backend(4).impl("layer", scale=0.3)
    with pytest.raises(ValueError, match=r"^kv_cache: none given, but row 0 reads 5 tokens of it"):
        impl.forward(torch.zeros(1, 4, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8), None, shared_step)


def test_a_profiling_run_in_chunks_is_no_rank():
    """Virtual requests whose tokens have no slots and stand far behind their lengths."""
    backend = make_backend(4)
    builder = CommonMetadataBuilder(4, backend=backend)
    metadata = builder.build([SequenceGroup(True, [Sequence(0, 10, 0, None)])])
    local = local_attention_metadata(metadata, chunk_size=4, block_size=4)
    query, (key, value) = torch.randn(10, 4, 8), torch.randn(2, 10, 2, 8)
    output = backend.impl("layer", scale=0.3).forward(query, key, value, None, local)
    for some in (slice(0, 4), slice(4, 8), slice(8, 10)):
        expected = dense_attention(query[some], key[some], value[some], scale=0.3)
        torch.testing.assert_close(output[some], expected, atol=2e-5, rtol=2e-5)
