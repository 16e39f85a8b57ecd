"""Batches with bidirectional spans: what `set_spans` takes, the field of each step, builds that would cut a span."""

import itertools

import numpy as np
import pytest
from builder.plain_backend import BLOCK, Plain, config
from interrupted_calls import AtOpcode

from attncore import BackendSpec, MultipleOf
from attncore.builder import (
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    local_attention_metadata,
    metadata_from_fields,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.builder.fields import ARRAYS

SPANS = [(2, 5), (5, 7), (9, 12)]
ENDS = [0, 0, 5, 5, 5, 7, 7, 0, 0, 12, 12, 12, 0]
"""The ends of the first 13 tokens of a request with these spans."""


def new_batch(kernels=None, **options):
    options = {"max_num_reqs": 6, "max_model_len": 64, "block_size": BLOCK, "spans": True} | options
    return InputBatch(kernels=kernels, **options)


def new_builder(kernels=None, **options):
    batch = new_batch(kernels)
    return batch, MetadataBuilder(batch, **{"max_num_batched_tokens": 64} | options)


def started(kernels=None, **options):
    batch, builder = new_builder(kernels, **options)
    batch.add_request("a", [9, 3, 7, 5])
    batch.add_request("b", [1, 2, 6], 2)
    batch.set_spans("a", SPANS)
    return batch, builder


def declaring(features, level="always", **options):
    spec = BackendSpec(
        name="plain", api=1, factory="tests:Plain", devices={"any": 0}, dtypes={"float32"}, cuda_graph=level,
        head_sizes=MultipleOf(1), block_sizes=MultipleOf(1), features=features, **options,
    )  # fmt: skip
    return Plain(config(spec))


@pytest.mark.parametrize("transport", ["none", "copy"])
def test_a_step_has_the_end_of_each_tokens_span(kernels, transport):
    batch, builder = started(kernels, **({} if transport == "none" else {"transport": transport}))
    metadata = builder.build({"a": 13, "b": 1})
    assert metadata.req_ids == ("b", "a")
    assert metadata.host.span_ends.dtype == np.int32
    assert metadata.host.span_ends.tolist() == metadata.span_ends.tolist() == [0, *ENDS]
    assert metadata.decode_metadata.span_ends is metadata.decode_metadata.host.span_ends is None
    assert metadata.prefill_metadata.span_ends.tolist() == metadata.prefill_metadata.host.span_ends.tolist() == ENDS
    assert "span_ends" in metadata.host.field_names()
    metadata = builder.build()
    assert metadata.span_ends is metadata.host.span_ends is None
    assert "span_ends" not in metadata.host.field_names()
    assert batch.num_computed_tokens("a") == 14


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_ends_are_there_when_engines_fill_their_fields(kernels, transport):
    """A view that is taken then is the step's later on."""
    _batch, builder = started(kernels, transport=transport)
    seen = []

    def fill(metadata, out):
        seen.append((metadata.host.span_ends.tolist(), metadata.prefill_metadata.host.span_ends.tolist()))

    builder.register_field("own", "int32", "token", fill)
    metadata = builder.build({"a": 13})
    assert seen == [(metadata.span_ends.tolist(), metadata.prefill_metadata.span_ends.tolist())]
    assert metadata.prefill_metadata.span_ends.tolist() == ENDS


def test_steps_of_the_same_counts_with_and_without(kernels):
    """Views that an arena keeps while the counts are the same."""
    batch, builder = new_builder(kernels)
    for turn in range(8):
        batch.add_request(turn, [1, 2])
        if turn % 4 < 2:
            batch.set_spans(turn, [(turn % 4, 3)])
        metadata = builder.build({turn: 4})
        ends = [0, 3, 3, 3, 0][-4:] if turn % 4 else [3, 3, 3, 0]
        if turn % 4 == 1:
            ends = [0, 3, 3, 0]
        for found in (metadata.span_ends, metadata.host.span_ends):
            assert (found is None) if turn % 4 > 1 else (found.tolist() == ends)
        batch.remove_request(turn)


@pytest.mark.parametrize("seed", range(6))
def test_random_chunks_are_those_of_each_request_alone(kernels, seed):
    """Requests join, leave, are preempted and change rows; each step's ends are those of its requests' positions."""
    random = np.random.default_rng(seed)
    batch, builder = new_builder(kernels, max_num_batched_tokens=400, decode_threshold=3)
    plain_batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=BLOCK, kernels=kernels)
    plain = MetadataBuilder(plain_batch, max_num_batched_tokens=400, decode_threshold=3)
    spans, count = {}, 0
    for _ in range(40):
        if len(spans) < 6:
            count += 1
            for one in (batch, plain_batch):
                one.add_request(count, list(range(1 + 16 * (count % 6), 17 + 16 * (count % 6))))
            edges = sorted(random.choice(40, 2 * int(random.integers(0, 4)), replace=False).tolist())
            spans[count] = list(zip(edges[::2], edges[1::2], strict=True))
            batch.set_spans(count, spans[count])
        scheduled = {}
        for name in batch:
            context = batch.num_computed_tokens(name)
            allowed = [n for n in range(9) if not any(a < context + n < b for a, b in spans[name])] + [64]
            scheduled[name] = min(int(random.choice(allowed)), 64)
            if context + scheduled[name] > 64 or scheduled[name] == 64:
                scheduled[name] = max(64 - context, 0)
        metadata, same = builder.build(scheduled), plain.build(scheduled)
        assert metadata.req_ids == same.req_ids
        wanted = [
            next((b for a, b in spans[metadata.req_ids[row]] if a <= position < b), 0)
            for row, position in zip(metadata.token_to_req_indices.tolist(), metadata.positions.tolist(), strict=True)
        ]
        assert (metadata.span_ends is None) == (not any(wanted))
        assert not any(wanted) or metadata.span_ends.tolist() == wanted
        for name in ARRAYS - {"span_ends"}:
            if hasattr(same, name):
                assert getattr(metadata, name).tolist() == getattr(same, name).tolist(), name
        if wanted and any(wanted):
            arrived = metadata_from_fields(metadata.asdict_zerocopy())
            assert arrived.span_ends.tolist() == wanted
        for name in list(batch):
            if batch.num_computed_tokens(name) == 64 or random.integers(0, 8) == 0:
                for one in (batch, plain_batch):
                    one.remove_request(name)
                del spans[name]
            elif random.integers(0, 8) == 0:
                for one in (batch, plain_batch):
                    one.append_blocks(name, one.preempt(name))
        assert all(batch.spans(name) == spans[name] for name in batch)
    assert builder.kernels == batch.kernels


@pytest.mark.parametrize(
    ("computed", "tokens", "said"),
    [
        (0, 3, "scheduled: tokens 0 to 2 of request 'a' cut its span [2, 5), {}; schedule 5 tokens or more, or 2"),
        (2, 2, "scheduled: tokens 2 to 3 of request 'a' cut its span [2, 5), {}; schedule 3 tokens or more"),
        (5, 5, "scheduled: tokens 5 to 9 of request 'a' cut its span [9, 12), {}; schedule 7 tokens or more, or 4"),
        (3, 9, "spans: request 'a' has 3 computed tokens, which end within its span [2, 5); the whole span runs in one "
               "step, so take back 1 with batch.rollback, or add the request with 2 at most"),
        (11, 1, "spans: request 'a' has 11 computed tokens, which end within its span [9, 12); the whole span runs in "
                "one step, so take back 2 with batch.rollback, or add the request with 9 at most"),
    ],
)  # fmt: skip
def test_a_build_that_cuts_a_span_is_refused(kernels, computed, tokens, said):
    batch, builder = new_builder(kernels)
    batch.add_request("a", [9, 3, 7, 5], computed)
    batch.add_request("b", [1, 2, 6], 2)
    batch.set_spans("a", SPANS)
    with pytest.raises(ValueError, match=r"^(scheduled|spans): ") as refused:
        builder.build({"a": tokens})
    assert str(refused.value) == said.format("which runs in one step")
    assert [batch.num_computed_tokens(name) for name in "ab"] == [computed, 2]
    assert (builder.last_step, batch.spans("a")) == (-1, SPANS)
    metadata = builder.build({"a": 0})
    assert (metadata.req_ids, metadata.span_ends) == (("b",), None)


def test_what_a_refused_build_left_is_not_seen(kernels):
    """Neither the ends that it had written, nor those of the step before of the same arena."""
    batch, builder = new_builder(kernels, depth=1)
    for name in "ab":
        batch.add_request(name, [1 + ord(name) % 97 * 4 + i for i in range(4)])
        batch.set_spans(name, [(0, 3)])
    with pytest.raises(ValueError, match=r"request 'b' cut its span \[0, 3\)"):
        builder.build({"a": 3, "b": 2})
    assert builder.build({"a": 3, "b": 3}).span_ends.tolist() == [3] * 6
    assert builder.build({"a": 3, "b": 3}).span_ends is None


@pytest.mark.parametrize(
    ("spans", "error", "said"),
    [
        ([(3, 3)], ValueError, r"spans: of request 'a': \[3, 3\) has no token; give start < stop"),
        ([(-1, 3)], ValueError, r"spans: of request 'a', at index 0: -1 is "),
        ([(60, 65)], ValueError, r"spans: of request 'a': \[60, 65\) ends behind the 64 tokens of max_model_len"),
        ([(0, 4), (3, 5)], ValueError, r"spans: of request 'a': \[3, 5\) begins before 4, where the one before"),
        ([(6, 8), (0, 4)], ValueError, r"spans: of request 'a': \[0, 4\) begins before 8"),
        ([(0, 4, 5)], ValueError, r"spans: of request 'a': \(0, 4, 5\) at index 0; give pairs \(start, stop\)"),
        ([(0, 4), (5,)], ValueError, r"spans: of request 'a': \(5,\) at index 1; give pairs \(start, stop\)"),
        ([0, 4], TypeError, r"spans: of request 'a', at index 0: int cannot be read as a list"),
        ([(0.5, 4)], TypeError, r"spans: of request 'a', at index 0: 0.5 "),
        ([(False, True)], TypeError, r"spans: of request 'a', at index 0: False "),
        (["ab"], TypeError, r"spans: of request 'a', at index 0: 'a' "),
        (None, TypeError, r"spans: of request 'a': NoneType cannot be read as a list"),
        ({(0, 4)}, TypeError, r"spans: of request 'a': set found, which has no order"),
        ({0: 4}, TypeError, r"spans: of request 'a': dict found, which has keys and values"),
        ([(0, 1 << 40)], ValueError, r"spans: of request 'a', at index 0: 1099511627776 does not fit int32"),
        (((i, i + 1) for i in itertools.repeat(3)), ValueError, r"spans: of request 'a': \[3, 4\) begins before 4"),
    ],
)  # fmt: skip
def test_what_are_no_spans_is_refused(spans, error, said):
    batch, builder = started()
    with pytest.raises(error, match=f"^{said}"):
        batch.set_spans("a", spans)
    assert batch.spans("a") == SPANS
    assert builder.build({"a": 13}).span_ends.tolist() == [0, *ENDS]


def test_spans_are_replaced_copied_and_dropped(kernels):
    batch, builder = started(kernels)
    given = np.array([(0, 2), (2, 3)], np.int64)
    batch.set_spans("a", given)
    given[:] = 40
    assert batch.spans("a") == [(0, 2), (2, 3)]
    assert builder.build({"a": 4}).span_ends.tolist() == [0, 2, 2, 3, 0]
    batch.set_spans("a", [])
    assert batch.spans("a") == batch.spans("b") == []
    assert builder.build({"a": 5}).span_ends is None
    batch.set_spans("b", np.zeros((0, 2)))
    with pytest.raises(ValueError, match="'nobody' is not in the batch"):
        batch.set_spans("nobody", [(0, 1)])
    with pytest.raises(ValueError, match="'nobody' is not in the batch"):
        batch.spans("nobody")


def test_spans_go_with_their_request(kernels):
    batch, builder = started(kernels)
    batch.swap_rows(0, 1)
    assert (batch.spans("a"), batch.spans("b")) == (SPANS, [])
    builder.build({"a": 13})
    blocks = batch.preempt("a")
    batch.append_blocks("a", blocks)
    assert builder.build({"a": 13, "b": 1}).span_ends.tolist() == [0, *ENDS]
    nbytes = batch.nbytes
    batch.remove_request("a")
    assert batch.nbytes < nbytes
    batch.add_request("a", blocks)
    assert batch.spans("a") == []
    assert builder.build({"a": 3, "b": 1}).span_ends is None


def test_a_batch_without_spans_has_none():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", [1, 2])
    with pytest.raises(ValueError, match=r"^spans: this batch was made without; give InputBatch spans=True"):
        batch.set_spans("a", [(0, 2)])
    assert batch.spans("a") == []
    metadata = builder.build({"a": 4})
    assert not hasattr(metadata, "span_ends")
    assert not hasattr(metadata.host, "span_ends")
    with pytest.raises(TypeError, match=r"^spans: "):
        InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK, spans="yes")


def test_what_cannot_run_spans_is_refused():
    batch, common = new_batch(), {"max_num_batched_tokens": 64}
    with pytest.raises(ValueError, match=r"^batch: made with spans, but not with context_parallel; a rank has some"):
        MetadataBuilder(batch, context_parallel=ContextParallel(2, 0, block_size=2), **common)
    without = declaring(set(), unsupported={"bidirectional_spans": "its kernel takes no mask"})
    with pytest.raises(
        ValueError,
        match=r"^batch: made with spans, but backend 'plain' of group .* does not have the feature "
        r"bidirectional_spans \(its kernel takes no mask\); ask for it in the request",
    ):
        MetadataBuilder(batch, without, **common)
    _, builder = started()
    fields = builder.build({"a": 13}).asdict_zerocopy()
    with pytest.raises(
        ValueError, match=r"^metadata: it holds spans \(span_ends\), and plain does not have the feature"
    ):
        metadata_from_fields(fields, without)


def test_captured_sizes_of_tokens_have_the_field_always_and_those_of_decodes_never(kernels):
    backend = declaring({"bidirectional_spans", "multi_token_decode"})
    for transport in ("auto", "copy"):
        batch = new_batch(kernels)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, decode_threshold=4, transport=transport)
        batch.add_request("a", [9, 3, 7, 5])
        batch.add_request("b", [1, 2, 6], 2)
        decodes = builder.capture(2, query_len=4)
        assert decodes.span_ends is decodes.host.span_ends is None
        captured = builder.capture(3, num_tokens=16)
        assert captured.span_ends.tolist() == [0] * 16
        for spans, ends in (([], [0] * 16), (SPANS, [0, *ENDS, 0, 0])):
            batch.set_spans("a", spans)
            metadata = builder.build({"a": 13}, bucket=(3, 16))
            assert captured.span_ends.tolist() == metadata.span_ends.tolist() == ends
            batch.rollback_many({"a": 13, "b": 1})
        batch.set_spans("a", [])
        assert builder.build(query_len=4, bucket=(3, 16)).span_ends.tolist() == captured.span_ends.tolist() == [0] * 16
        batch.rollback_many({"a": 4, "b": 4})
        assert builder.build(bucket=(3, 16)).span_ends.tolist() == captured.span_ends.tolist() == [0] * 16
        batch.rollback_many({"a": 1, "b": 1})
        assert builder.build_empty((3, 16)).span_ends.tolist() == [0] * 16
        batch.set_spans("a", [(1, 4)])
        with pytest.raises(
            ValueError, match=r"^bucket: 2, but request 'a' runs a span in this step, and graphs of decodes"
        ):
            builder.build(query_len=4, bucket=2)
        assert builder.build({"a": 1, "b": 4}, query_len=1).num_tokens == 5  # ahead of the span
        batch.rollback_many({"a": 1, "b": 4})
        assert batch.num_computed_tokens("a") == 0
        batch.set_spans("a", [(5, 8)])
        assert builder.build(query_len=4, bucket=2).span_ends is None


def test_steps_ahead_stop_ahead_of_a_span(kernels):
    batch, builder = started(kernels, transport="copy")
    builder.capture(2)
    said = r"^run_ahead: request 'a' reaches its span \[2, 5\) within 3 steps; a span runs in one step, which build\(\)"
    with pytest.raises(ValueError, match=said):
        builder.run_ahead(3, bucket=2)
    assert [batch.num_computed_tokens(name) for name in "ab"] == [0, 2]
    steps = builder.run_ahead(2, bucket=2)
    for step in (steps.first, steps[0], steps[1]):
        assert step.span_ends is step.host.span_ends is None


def test_groups_share_the_ends():
    groups = [KVCacheGroup("full", 8, kernel_block_size=4), KVCacheGroup("window", 4, sliding_window=4)]
    batch = new_batch(block_size=None, groups=groups)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", {"full": [5, 6], "window": [3, 4, 7, 8]})
    batch.set_spans("a", SPANS)
    metadata = builder.build({"a": 13})
    assert all(one.span_ends.tolist() == ENDS for one in metadata.groups.values())
    batch.release_passed_blocks()
    assert all(one.span_ends is None for one in builder.build().groups.values())


def test_spans_beside_draft_trees():
    batch = new_batch()
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=8, draft_trees=True)
    batch.add_request("a", [9, 3, 7, 5])
    batch.add_request("b", [1, 2, 6], 2)
    batch.set_spans("a", SPANS)
    metadata = builder.build({"a": 13}, trees={"b": [-1, -1]})
    assert metadata.tree_mask.tolist() == [1, 3, 5, *[0] * 13]
    assert metadata.span_ends.tolist() == [0] * 3 + ENDS
    batch.rollback("a", 13)
    with pytest.raises(ValueError, match=r"^trees: request 'a' runs a tree where it has the span \[2, 5\)"):
        builder.build({"b": 0}, trees={"a": [-1] * 6})


def test_spans_in_slices_and_blocks_of_a_step():
    _, builder = started()
    metadata = builder.build({"a": 13})
    first, second = slice_by_requests(metadata.query_lens, 2)
    assert slice_metadata(metadata, first).span_ends is None
    assert slice_metadata(metadata, second).span_ends.tolist() == ENDS
    early, late = slice_by_tokens(metadata.query_lens, 2)  # 7 and 7: b and 6 tokens of a, ahead of the last of a span
    with pytest.raises(ValueError, match=r"^batch_slice: cuts a span ahead of token 7, whose tokens see each other"):
        slice_metadata(metadata, early, block_size=BLOCK)
    with pytest.raises(ValueError, match=r"^batch_slice: cuts a span ahead of token 7"):
        slice_metadata(metadata, late)
    between = early._replace(token_stop=6), late._replace(token_start=6)  # between the first two, which touch
    cut = [slice_metadata(metadata, one, block_size=BLOCK).span_ends.tolist() for one in between]
    assert cut == [[0, *ENDS[:5]], ENDS[5:]]
    with pytest.raises(ValueError, match=r"^metadata: it holds spans, whose tokens see some of those behind them"):
        local_attention_metadata(metadata, 4, BLOCK)


@pytest.mark.parametrize(
    ("token", "end"), [(0, 3), (3, 4), (3, 6), (7, 0), (7, 8), (12, 13), (13, 14), (13, 13), (10, 13), (9, -1)]
)
def test_ends_that_arrive_and_are_of_no_spans_are_refused(token, end):
    _, builder = started()
    fields = builder.build({"a": 13}).asdict_zerocopy()
    ends = fields["span_ends"] = fields["span_ends"].copy()
    assert metadata_from_fields(fields).span_ends.tolist() == [0, *ENDS]
    ends[token] = end
    valid = (token, end) in ((13, 13), (0, 3))  # one more span, of one token
    if valid:
        assert metadata_from_fields(fields).span_ends.tolist() == ends.tolist()
        return
    with pytest.raises(ValueError, match=r"^fields\['span_ends'\]: -?\d+ of token \d+; it is the position behind"):
        metadata_from_fields(fields)


def test_ends_of_padded_rows_that_arrive():
    batch = new_batch()
    backend = declaring({"bidirectional_spans"})
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    batch.add_request("a", [9, 3, 7, 5])
    batch.set_spans("a", SPANS)
    builder.capture(3, num_tokens=16)
    fields = builder.build({"a": 13}, bucket=(3, 16)).asdict_zerocopy()
    assert metadata_from_fields(fields).span_ends.tolist() == [*ENDS, 0, 0, 0]
    fields["span_ends"] = fields["span_ends"].copy()
    fields["span_ends"][14] = 15
    with pytest.raises(ValueError, match=r"^fields\['span_ends'\]: 15 of token 14"):
        metadata_from_fields(fields)


@pytest.mark.parametrize("call", ["set", "remove", "build"])
def test_an_interrupted_call_has_happened_or_nothing_has(kernels, call):
    """Before every so many opcodes; what follows it goes on from one of the two."""
    count, outcomes = 0, set()
    while True:
        batch, builder = started(kernels)
        interrupted = AtOpcode(count)
        with interrupted:
            if call == "set":
                batch.set_spans("a", [(1, 3)])
            elif call == "remove":
                batch.remove_request("a")
            else:
                builder.build({"a": 13})
        spans = batch.spans("a") if "a" in batch else None
        computed = tuple(batch.num_computed_tokens(name) for name in batch)
        outcomes.add((str(spans), computed))
        if spans is not None:
            batch.rollback_many({"a": batch.num_computed_tokens("a")})
            metadata = builder.build({"a": 13, "b": 1})
            assert metadata.span_ends.tolist() == [0, *(ENDS if spans == SPANS else [0, 3, 3, *[0] * 10])]
        else:
            batch.add_request("a", [9, 3, 7, 5])
            assert batch.spans("a") == []
        assert builder.build({"a": 1, "b": 1}).span_ends is None
        if not interrupted.fired:
            break
        count += 7 if call == "build" else 1
    before = (str(SPANS), (0, 2))
    after = {"set": (str([(1, 3)]), (0, 2)), "remove": ("None", (2,)), "build": (str(SPANS), (3, 13))}
    assert outcomes == {before, after[call]}
