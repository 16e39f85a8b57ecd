"""Speculative decoding with the persistent builder: queries of several tokens, and roll-backs."""

import random

import oracles
import pytest

from attncore.builder import InputBatch, MetadataBuilder, reorder_batch, split_decodes_and_prefills

BLOCK = 4


def new_builder(kernels, threshold, n=7):
    batch = InputBatch(max_num_reqs=n, max_model_len=64, block_size=BLOCK, kernels=kernels)
    return batch, MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=threshold)


@pytest.mark.parametrize(
    ("query_lens", "split"), [([1, 2, 1, 3, 2, 1, 2], (7, 12, 0, 0)), ([4, 5, 6, 7], (0, 0, 4, 22))]
)
def test_the_threshold_says_who_decodes(kernels, query_lens, split):
    batch, builder = new_builder(kernels, 3)
    for row, _ in enumerate(query_lens):
        batch.add_request(row, [2 * row + 1, 2 * row + 2])
    metadata = builder.build(dict(enumerate(query_lens)))
    assert metadata.moves == ()
    assert (
        metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills, metadata.num_prefill_tokens
    ) == split  # fmt: skip
    assert metadata.query_start_loc.tolist() == oracles.sums(query_lens)
    assert metadata.max_decode_query_len == (max(query_lens) if split[0] else 1)
    assert split_decodes_and_prefills(metadata.query_lens, 3) == split


@pytest.mark.parametrize("threshold", [0, -1, True, 1.0])
def test_thresholds_that_split_nothing_are_refused(kernels, threshold):
    batch, _ = new_builder(kernels, 1)
    for call in (
        lambda: MetadataBuilder(batch, max_num_batched_tokens=8, decode_threshold=threshold),
        lambda: split_decodes_and_prefills([1, 2], threshold),
        lambda: reorder_batch([1, 2], decode_threshold=threshold),
    ):
        with pytest.raises((ValueError, TypeError), match="decode_threshold: "):
            call()


def test_drafts_are_decodes_and_go_before_prompts(kernels):
    batch, builder = new_builder(kernels, 3)
    for name, computed in (("prompt", 0), ("three", 5), ("one", 6)):
        batch.add_request(name, [1, 2], computed)
    metadata = builder.build({"prompt": 4, "three": 3})
    assert (metadata.req_ids, metadata.moves) == (("one", "three", "prompt"), ((0, 2),))
    assert metadata.query_lens.tolist() == [1, 3, 4]
    assert metadata.decode_metadata.query_start_loc.tolist() == [0, 1, 4]
    assert (metadata.decode_metadata.max_decode_query_len, metadata.max_query_len) == (3, 4)
    assert metadata.prefill_metadata.query_start_loc.tolist() == [0, 4]


def test_query_len_gives_every_request_as_many_drafts(kernels):
    batch, builder = new_builder(kernels, 3)
    for name in "ab":
        batch.add_request(name, [1, 2], 2)
    metadata = builder.build({"b": 1}, query_len=3)
    assert (metadata.query_lens.tolist(), metadata.num_decodes) == ([3, 1], 2)
    for query_len, message in ((0, "0 is below 1"), (2**31, "does not fit int32"), (2.0, "is not an integer")):
        with pytest.raises((ValueError, TypeError), match=f"query_len: .*{message}"):
            builder.build(query_len=query_len)
    assert [batch.num_computed_tokens(name) for name in "ab"] == [5, 3]


def test_rejected_drafts_are_written_again(kernels):
    batch, builder = new_builder(kernels, 4)
    batch.add_request("a", [5, 6], 2)
    assert builder.build(query_len=4).slot_mapping.tolist() == [22, 23, 24, 25]
    batch.rollback("a", 3)  # the block in use is the first one again
    assert builder.build().slot_mapping.tolist() == [23]
    assert builder.build().slot_mapping.tolist() == [24]


@pytest.mark.parametrize("captured", [False, True])
def test_random_acceptance(kernels, captured):
    """Each step drafts for every request, accepts some of each, and takes the others back in one call."""
    rng, threshold = random.Random(3), 4
    batch, builder = new_builder(kernels, threshold, n=5)
    blocks = {row: list(range(1 + 20 * row, 17 + 20 * row)) for row in range(5)}
    computed = dict.fromkeys(blocks, 0)
    for row in blocks:
        batch.add_request(row, blocks[row])
    if captured:
        builder.capture(5, threshold)
    for _ in range(60 if kernels == "numba" else 300):
        queries = dict.fromkeys(blocks, threshold) if captured else {row: rng.randint(1, threshold) for row in blocks}
        metadata = builder.build(queries, bucket=5 if captured else None)
        rows = [(blocks[row], computed[row], queries[row]) for row in metadata.req_ids]
        for name, expected in oracles.persistent_step(rows, BLOCK, threshold).items():
            value = getattr(metadata, name)
            assert (value if isinstance(value, int) else value.tolist()) == expected, name
        rejected = {row: rng.randint(0, count - 1) for row, count in queries.items()}
        batch.rollback_many(rejected)
        for row in blocks:
            computed[row] += queries[row] - rejected[row]
            if computed[row] > 64 - threshold:
                batch.rollback(row, computed[row])
                computed[row] = 0


def test_rollback_many_changes_nothing_where_one_request_goes_too_far(kernels):
    batch, builder = new_builder(kernels, 3)
    for name in "ab":
        batch.add_request(name, [1, 2])
    builder.build(query_len=2)
    with pytest.raises(ValueError, match="num_tokens: 3 goes past the start of request 'b', which has 2 computed"):
        batch.rollback_many({"a": 1, "b": 3})
    assert [batch.num_computed_tokens(name) for name in "ab"] == [2, 2]
