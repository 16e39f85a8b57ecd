"""Drafts on a rank of decode context parallelism: refused wherever a backend would be handed them."""

import dataclasses

import pytest

from attncore import AttentionRequest, InputBatch, MetadataBuilder, select
from attncore.builder import ContextParallel, metadata_from_fields

BLOCK = 4
RANKS = [ContextParallel(2, rank, BLOCK, interleave) for rank in (0, 1) for interleave in (1, BLOCK)]
ROW = r"^metadata: row 0 has 3 query tokens, of which this rank keeps (1|2); a backend hides the last keys"


@pytest.fixture(scope="module")
def backend():
    request = AttentionRequest(
        num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=BLOCK, backend="reference"
    )
    return select(request).create("cpu")


def batch_of(context):
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=2 * BLOCK)
    batch.add_request("a", [1, 2, 3], num_computed_tokens=context)
    return batch


def drafts(context=7, tokens=3):
    return MetadataBuilder(batch_of(context), max_num_batched_tokens=16, decode_threshold=tokens).build({"a": tokens})


@pytest.mark.parametrize("threshold", [2, 4])
def test_a_builder_of_a_rank_with_a_backend_takes_no_drafts(backend, threshold):
    given = {"max_num_batched_tokens": 16, "decode_threshold": threshold, "context_parallel": RANKS[0]}
    with pytest.raises(ValueError, match=rf"^decode_threshold: {threshold} with context_parallel of 2 ranks and a bac"):
        MetadataBuilder(batch_of(9), backend, **given)
    assert MetadataBuilder(batch_of(9), **given).build({"a": threshold}).num_decodes == 1  # rows are the engine's
    assert MetadataBuilder(batch_of(9), backend, **given | {"decode_threshold": 1}).build().num_decodes == 1


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_a_ranks_view_for_a_backend_takes_no_drafts(backend, rank):
    with pytest.raises(ValueError, match=ROW):
        rank.metadata(drafts(), backend)
    assert rank.metadata(drafts()).num_decodes == 1
    assert rank.metadata(drafts(tokens=1), backend).num_decodes == 1


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_a_ranks_fields_for_a_backend_take_no_drafts(backend, rank):
    mine = rank.metadata(drafts())
    with pytest.raises(ValueError, match=ROW):
        metadata_from_fields(mine.asdict_zerocopy(), backend)
    with pytest.raises(ValueError, match=ROW):
        backend.check_metadata(mine)
    assert metadata_from_fields(mine.asdict_zerocopy()).num_decodes == 1


def test_a_rank_that_keeps_every_draft_may_have_them(backend):
    """Its queries see what they see of a whole request; the other rank, which keeps none, is refused."""
    keeps, other = ContextParallel(2, 0, BLOCK, BLOCK), ContextParallel(2, 1, BLOCK, BLOCK)
    assert keeps.metadata(drafts(context=8), backend).max_decode_query_len == 3
    with pytest.raises(ValueError, match=r"of which this rank keeps 0; a backend hides"):
        other.metadata(drafts(context=8), backend)


def test_whole_requests_a_profiling_run_and_prefills_are_no_ranks(backend):
    backend.check_metadata(drafts())
    batch = batch_of(0)
    builder = MetadataBuilder(batch, backend=None, max_num_batched_tokens=16, decode_threshold=3)
    backend.check_metadata(builder.build_profile([3, 2]))
    chunk = MetadataBuilder(batch_of(7), max_num_batched_tokens=16).build({"a": 5})
    assert RANKS[0].metadata(chunk, backend).num_prefills == 1  # the reference sees what its tokens' slots say


def test_a_backend_made_by_hand_is_not_checked(backend):
    by_hand = type(backend)(dataclasses.replace(backend.config, spec=None))
    assert RANKS[0].metadata(drafts(), by_hand).num_decodes == 1
