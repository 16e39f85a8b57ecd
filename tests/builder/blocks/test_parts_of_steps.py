"""Slices, chunks and shares of steps that are more than plain: of a rank, of a cross group, padded, with encoders."""

import copy

import numpy as np
import pytest

from attncore.builder import (
    BatchSlice,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    get_seq_len_block_table_args,
    local_attention_metadata,
    metadata_from_fields,
    new_tokens_metadata,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.errors import AttncoreError

RANK = ContextParallel(2, 0, 4)
ENCODER_LENS = {"a": 7, "b": 6, "c": 3}


def step_of_a_rank(scheduled, **builder_options):
    """a has 8 tokens, b 10; blocks are virtual, of 8."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=3, **builder_options)
    batch.add_request("a", [1, 2, 3], num_computed_tokens=8)
    batch.add_request("b", [4, 5, 6], num_computed_tokens=10)
    return builder.build(scheduled)


def padded_step():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    builder.capture(4)
    batch.add_request("a", [1, 2, 3], num_computed_tokens=8)
    return builder.build(bucket=4)


def step_with_encoders():
    """c decodes, its encoder done; b and a run their encoders, b with one token."""
    groups = [KVCacheGroup("own", 4), KVCacheGroup("cross", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=32, max_encoder_len=32, groups=groups)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    for index, (name, encoder) in enumerate(ENCODER_LENS.items()):
        blocks = {"own": [10 * index + k for k in (1, 2, 3)], "cross": [10 * index + k for k in (4, 5)]}
        batch.add_request(name, blocks, encoder_seq_len=encoder, encoder_computed=name == "c")
    return builder.build({"a": 9})


def test_slices_with_encoders_run_every_encoder_token_once():
    step = step_with_encoders()
    assert [name for name in step.req_ids if name == "a"] == ["a"]
    assert step.req_ids[-1] == "a"
    slices = slice_by_tokens(step.query_lens, 3)  # 11 tokens: a is cut twice
    for metadata in step.groups.values():
        parts = [slice_metadata(metadata, part, block_size=4) for part in slices]
        for name in ("cross_slot_mapping", "positions"):
            whole = np.concatenate([getattr(part, name) for part in parts])
            assert whole.tolist() == getattr(metadata, name).tolist()
        for part in parts:
            sums = np.cumsum([0, *part.encoder_query_lens.tolist()])
            assert part.encoder_query_start_loc.tolist() == sums.tolist()
            assert len(part.cross_slot_mapping) == sums[-1]
        assert [part.encoder_query_lens[-1] for part in parts] == [7, 0, 0]


def test_slices_of_a_cross_group_keep_the_encoder_s_keys():
    step = step_with_encoders()
    metadata = step.groups["cross"]
    for part in slice_by_tokens(metadata.query_lens, 3):
        piece = slice_metadata(metadata, part)  # no block of the keys changes, so no block size
        names = step.req_ids[part.req_start : part.req_stop]
        assert piece.seq_lens.tolist() == [ENCODER_LENS[name] for name in names]
        assert piece.encoder_seq_lens.tolist() == piece.seq_lens.tolist()
        assert piece.paged_kv_last_page_len.tolist() == [(ENCODER_LENS[name] - 1) % 4 + 1 for name in names]
        assert piece.paged_kv_indptr[-1] == sum(-(-ENCODER_LENS[name] // 4) for name in names)
        assert len(piece.paged_kv_indices) == piece.paged_kv_indptr[-1]
        assert piece.query_lens.sum() == part.token_stop - part.token_start


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_step_is_sliced_between_requests_and_by_way_of_the_whole(rank):
    share = ContextParallel(2, rank, 4)
    scheduled = {"a": 6, "b": 2}
    whole, local = step_of_a_rank(scheduled), step_of_a_rank(scheduled, context_parallel=share)
    for part in slice_by_requests(whole.query_lens, 2):
        piece, expected = slice_metadata(local, part), share.metadata(slice_metadata(whole, part))
        for name in ("slot_mapping", "seq_lens", "context_lens", "query_lens", "paged_kv_indices", "logits_indices"):
            assert getattr(piece, name).tolist() == getattr(expected, name).tolist()
    cut = slice_by_tokens(whole.query_lens, 2)[0]
    message = "^batch_slice: cuts a request of which one rank of several keeps a part"
    for metadata in (local, share.metadata(whole)):
        with pytest.raises(ValueError, match=message):
            slice_metadata(metadata, cut, block_size=4)
    shares = [ContextParallel(2, r, 4).metadata(slice_metadata(whole, cut, block_size=8)) for r in (0, 1)]
    assert sum(one.seq_lens for one in shares).tolist() == [12, 10]


@pytest.mark.parametrize("taken", [lambda step: local_attention_metadata(step, 8, 4), RANK.metadata])
def test_what_is_not_of_whole_requests_is_refused(taken):
    decodes = {"a": 1, "b": 1}  # rank 0 keeps both new tokens: context + query is the length, but the rank's
    local = step_of_a_rank(decodes, context_parallel=RANK)
    assert (local.context_lens + local.query_lens).tolist() == local.seq_lens.tolist()
    for metadata in (local, RANK.metadata(step_of_a_rank(decodes))):
        for one in (metadata, metadata_from_fields(metadata.asdict_zerocopy())):
            with pytest.raises(ValueError, match=r"^metadata: it is that of one rank of several already"):
                taken(one)
        arrived = metadata_from_fields(metadata.asdict_zerocopy({"of_rank"}))
        with pytest.raises(ValueError, match=r"^metadata: row 0 has a length capped .*, or that of one rank"):
            taken(arrived)
    with pytest.raises(ValueError, match=r"^metadata: of a cross group"):
        taken(step_with_encoders().groups["cross"])
    with pytest.raises(ValueError, match=r"^metadata: padded for a graph"):
        taken(padded_step())
    graph = CommonMetadataBuilder(8, max_seq_len_to_capture=32)
    with pytest.raises(ValueError, match=r"^metadata: padded for a graph"):
        taken(graph.build([SequenceGroup(False, [Sequence(0, 1, 20, [1, 2, 3])])], 0))


PARTS = [
    lambda step: step,
    lambda step: step.prefill_metadata.prefill_metadata,
    lambda step: metadata_from_fields(step.asdict_zerocopy()),
    lambda step: metadata_from_fields(step.prefill_metadata.asdict_zerocopy()).prefill_metadata,
]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_one_ranks_already_is_refused_also_where_it_keeps_all_tokens_so_far(part):
    """Lengths do not tell it then, and other ranks would refuse."""
    share = ContextParallel(2, 0, 4, interleave=4)

    def step(**ranks):
        batch = InputBatch(max_num_reqs=1, max_model_len=32, block_size=8)
        batch.add_request("a", [3])
        return MetadataBuilder(batch, max_num_batched_tokens=8, **ranks).build({"a": 3})

    for metadata in (step(context_parallel=share), share.metadata(step())):
        assert (metadata.slot_mapping.tolist(), metadata.seq_lens.tolist()) == ([12, 13, 14], [3])
        assert part(metadata).of_rank
        with pytest.raises(ValueError, match=r"^metadata: it is that of one rank of several already"):
            share.metadata(part(metadata))
        with pytest.raises(ValueError, match="cuts a request of which one rank of several keeps a part"):
            slice_metadata(part(metadata), BatchSlice(0, 1, 0, 2), block_size=4)
    alone = ContextParallel(1, 0, 8)
    assert not part(step(context_parallel=alone)).of_rank
    assert alone.metadata(part(step(context_parallel=alone))).slot_mapping.tolist() == [24, 25, 26]


STARTS, INDICES, LAST = OF_PAGES = "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"


@pytest.mark.parametrize(
    "skipped", [(), ("slot_mapping",), (STARTS,), (INDICES,), (LAST,), (STARTS, INDICES), (INDICES, LAST)]
)
def test_a_slice_of_what_came_with_fields_skipped_has_the_others(skipped):
    """A request is cut alike whatever its sender skipped: its keys are no encoder's because slots are missing."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    batch.add_request("a", [3, 1, 2], 2)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=64).build({"a": 7})
    arrived = metadata_from_fields(metadata.asdict_zerocopy(set(skipped)))
    names = ("seq_lens", "context_lens", "seq_start_loc", "logits_indices", "slot_mapping", *OF_PAGES)
    for part in slice_by_tokens(metadata.query_lens, 2):
        whole, piece = (slice_metadata(step, part, block_size=4) for step in (metadata, arrived))
        assert piece.max_seq_len == whole.max_seq_len
        gone = {*skipped, INDICES} if STARTS in skipped else {*skipped}  # where a row's pages begin is not known
        for name in names:
            assert hasattr(piece, name) == (name not in gone)
            if name not in gone:
                assert getattr(piece, name).tolist() == getattr(whole, name).tolist(), name


@pytest.mark.parametrize("group", ["own", "cross"])
@pytest.mark.parametrize(
    "skipped",
    [
        {"slot_mapping"},
        {"slot_mapping", "cross_slot_mapping"},
        {"slot_mapping", "positions", "logits_indices"},
        {"slot_mapping", "cross_slot_mapping", "cross_block_table"},
        {"slot_mapping", "encoder_seq_lens"},
        {"slot_mapping", "encoder_seq_lens", "cross_block_table"},
    ],
)
def test_a_step_with_encoders_that_came_without_slots_is_cut(skipped, group):
    """A decoder group that is sent has the encoder's fields, too, and no slots tell it from the cross group."""
    metadata = step_with_encoders().groups[group]
    arrived = metadata_from_fields(metadata.asdict_zerocopy(skipped))
    for part in slice_by_tokens(metadata.query_lens, 3):
        whole, piece = (slice_metadata(step, part, block_size=4) for step in (metadata, arrived))
        for name in ("seq_lens", "context_lens", "query_lens", *OF_PAGES):
            assert getattr(piece, name).tolist() == getattr(whole, name).tolist(), name


@pytest.mark.parametrize("skipped", ["encoder_query_lens", "encoder_query_start_loc"])
@pytest.mark.parametrize("group", ["own", "cross"])
def test_a_cut_request_runs_its_encoder_once_where_one_of_its_fields_was_skipped(skipped, group):
    """attn-flash, say, declares the starts alone; without them no slots are known to be a slice's."""
    metadata = step_with_encoders().groups[group]
    arrived = metadata_from_fields(metadata.asdict_zerocopy({skipped}))
    left = {"encoder_query_lens", "encoder_query_start_loc", "cross_slot_mapping"} - {skipped}
    if skipped == "encoder_query_start_loc":
        left = {"encoder_query_lens"}
    for part in slice_by_tokens(metadata.query_lens, 3):
        whole, piece = (slice_metadata(step, part, block_size=4) for step in (metadata, arrived))
        assert {name: getattr(piece, name).tolist() for name in left} == {
            name: getattr(whole, name).tolist() for name in left
        }
        assert not hasattr(piece, skipped)


def test_a_step_padded_to_a_captured_size_is_not_sliced():
    step = padded_step()
    for part in slice_by_requests(step.query_lens, 2):
        with pytest.raises(ValueError, match=r"^metadata: padded to a captured size"):
            slice_metadata(step, part)


def test_counts_of_virtual_requests_and_shares_are_of_what_they_hold():
    step = step_with_encoders()  # neither carries the encoder's part
    for part in (local_attention_metadata(step, 4, 4), ContextParallel(2, 0, 2).metadata(step)):
        assert not hasattr(part, "encoder_seq_lens")
        assert (part.num_encoder_tokens, part.max_encoder_seq_len) == (0, 0)
    decodes = step_of_a_rank({"a": 3, "b": 3})  # b's tokens 10, 11 and 12 lie in two chunks
    local = local_attention_metadata(decodes, 4, 4)
    assert (local.num_decodes, local.max_decode_query_len) == (3, 3)
    decodes = step_of_a_rank({"a": 1, "b": 3})
    assert local_attention_metadata(decodes, 4, 4).max_decode_query_len == 2


DEVICE_FIELDS = (
    "slot_mapping", "positions", "token_to_req_indices", "query_lens", "context_lens", "seq_lens", "query_start_loc",
    "seq_start_loc", "logits_indices", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices",
)  # fmt: skip
ENCODER_FIELDS = ("encoder_query_lens", "encoder_query_start_loc", "encoder_seq_lens", "cross_slot_mapping")


def steps_sent(encoder):
    """Steps that are sent to a device with its own memory: prompts and drafts of random lengths."""
    random = np.random.default_rng(0)
    for _ in range(30):
        groups = [KVCacheGroup("own", 4), *([KVCacheGroup("cross", 4, cross=True)] if encoder else [])]
        more = {"max_encoder_len": 32} if encoder else {}
        batch = InputBatch(max_num_reqs=4, max_model_len=32, groups=groups, **more)
        builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=2, transport="copy")
        for row in range(int(random.integers(1, 5))):
            blocks = {"own": [10 * row + k for k in range(1, 9)]}
            options = {}
            if encoder:
                blocks["cross"] = [10 * row + k for k in range(1, 9)]
                options = {"encoder_seq_len": int(random.integers(1, 9))}
            batch.add_request(row, blocks, num_computed_tokens=int(random.integers(0, 12)), **options)
        yield builder.build({row: int(random.integers(1, 18)) for row in batch.req_ids})
        builder.close()


@pytest.mark.parametrize("encoder", [False, True])
def test_slices_through_requests_say_the_same_on_the_device(encoder):
    fields = DEVICE_FIELDS + (ENCODER_FIELDS if encoder else ())
    compared = 0
    for step in steps_sent(encoder):
        for count in range(2, min(5, step.num_tokens)):
            for part in slice_by_tokens(step.host.query_lens, count):
                piece = slice_metadata(step, part, block_size=4)
                for name in fields:
                    found, wanted = getattr(piece, name), getattr(piece.host, name)
                    assert found.tolist() == wanted.tolist(), (name, part)
                    compared += 1
    assert compared > 1000


def test_a_slice_knows_its_longest_decode():
    step = step_of_a_rank({"a": 3, "b": 9})
    (whole,) = [slice_metadata(step, part) for part in slice_by_requests(step.query_lens, 1)]
    assert (whole.num_decodes, whole.max_decode_query_len, whole.max_query_len) == (1, 3, 9)
    first, second = [slice_metadata(step, part) for part in slice_by_requests(step.query_lens, 2)]
    assert (first.max_decode_query_len, second.max_decode_query_len) == (3, 1)


@pytest.mark.parametrize("of_group", [False, True])
def test_steps_that_expire_are_taken_too(monkeypatch, of_group):
    """Under ATTNCORE_POISON=1 a build returns a wrapper, of which parts are made as of the step, and which expires."""
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, depth=1)
    batch.add_request("a", [1, 2, 3], 6)
    step = builder.build({"a": 9})
    metadata = step.groups["decoder"] if of_group else step
    assert isinstance(metadata, CommonAttentionMetadata)
    first, second = (slice_metadata(metadata, part, block_size=8) for part in slice_by_tokens(metadata.query_lens, 2))
    assert (first.seq_lens.tolist(), second.context_lens.tolist()) == ([10], [10])
    assert local_attention_metadata(metadata, 8, 8).query_lens.tolist() == [2, 7]
    assert ContextParallel(2, 0, 4).metadata(metadata).seq_lens.tolist() == [8]
    assert new_tokens_metadata(metadata).seq_lens.tolist() == [9]
    assert get_seq_len_block_table_args(metadata, True, "decoder")[1] == 15
    copied = copy.copy(metadata)
    assert copied.seq_lens.tolist() == [15]
    builder.build()
    for late in (metadata, copied):
        with pytest.raises(AttncoreError, match="after its arena was taken"):
            slice_metadata(late, (0, 1, 0, 9))
