"""What a signal's handler does to a batch happens before the call that it comes into, or is refused."""

from functools import partial
from itertools import count

import pytest
from builder.device.ahead_engine import Calls
from interrupted_calls import AtOpcode

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import AttncoreError, CaptureError, ConcurrentUseError

NAMES = "abc"
CALLS = {
    "append_blocks": lambda batch: batch.append_blocks("a", given(batch, [91])),
    "append_blocks_many": lambda batch: batch.append_blocks_many({"a": given(batch, [91]), "c": given(batch, [92])}),
    "rollback_many": lambda batch: batch.rollback_many({"a": 1, "c": 2}),
}


def given(batch, ids):
    return ids if len(batch.groups) == 1 else {"one": ids}


def batch_of(kernels, groups):
    own = {"block_size": 4} if groups == 1 else {"groups": [KVCacheGroup("one", 4), KVCacheGroup("other", 4)]}
    batch = InputBatch(max_num_reqs=4, max_model_len=64, kernels=kernels, **own)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    for row, name in enumerate(NAMES):
        ids = [10 * row + index for index in range(1, 5)]
        batch.add_request(name, ids if groups == 1 else {"one": ids, "other": ids}, 4 + row)

    def fill(metadata, out):
        raise RuntimeError("this step is not built")

    builder.register_field("number", "int64", "request", fill)
    return batch, builder


def state_of(batch):
    return {name: (batch.block_ids(name), batch.num_computed_tokens(name)) for name in batch.req_ids}


def fails(builder):
    """A build that moves rows and puts them back."""
    with pytest.raises((RuntimeError, ConcurrentUseError)):
        builder.build({"a": 3})


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_moved_and_moved_back_are_nobody_elses(kernels, name, groups):
    batch, _ = batch_of(kernels, groups)
    CALLS[name](batch)
    wanted = state_of(batch)
    for number in count():
        batch, builder = batch_of(kernels, groups)
        with AtOpcode(number, partial(fails, builder)) as handler:
            CALLS[name](batch)
        assert state_of(batch) == wanted, number
        if not handler.fired:
            break
    assert number > 5


@pytest.mark.parametrize("name", ["remove_request", "preempt", "swap_rows"])
def test_page_lists_are_of_the_step_or_refused(kernels, name):
    refused = 0
    for number in count():
        batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
        for row, request in enumerate(NAMES):
            batch.add_request(request, [10 * row + 1, 10 * row + 2], 5)
        host = MetadataBuilder(batch, max_num_batched_tokens=64).build().host
        call = {"swap_rows": lambda batch=batch: batch.swap_rows(0, 2)}.get(name, partial(getattr(batch, name), "b"))
        found = None
        with AtOpcode(number, call) as handler:
            try:
                found = host.paged_kv_indices.tolist()
            except AttncoreError:  # a ConcurrentUseError, too
                refused += 1
        assert found in (None, [1, 2, 11, 12, 21, 22]), number
        if not handler.fired:
            break
    assert number > 5
    assert 0 < refused < number


def test_what_is_kept_of_a_step_is_not_the_next_ones(kernels):
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=4, kernels=kernels)
    batch.add_request("a", [1, 2, 3])
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, depth=1)
    metadata = builder.build()

    def make():
        assert builder.build() is metadata
        return "first"

    assert metadata.once_a_step("_of_a_test", make) == "first"
    assert metadata.once_a_step("_of_a_test", lambda: "second") == "second"


def steps_ahead(kernels):
    """A builder whose next step takes the arena of two steps ahead that were replayed."""
    groups = [KVCacheGroup("one", 4), KVCacheGroup("other", 4)]
    batch = InputBatch(max_num_reqs=3, max_model_len=64, groups=groups, kernels=kernels)
    batch.add_request("a", {"one": range(1, 9), "other": range(11, 19)}, 3)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy", depth=1)
    graph = Calls(builder.capture(1))
    steps = builder.run_ahead(2, bucket=1)
    steps.replay(graph)
    steps.replay(graph)
    return builder, steps


def test_a_step_ahead_is_that_step_in_each_group_or_refused(kernels):
    refused = 0
    for number in count(step=397):
        builder, steps = steps_ahead(kernels)
        found = None
        with AtOpcode(number, builder.build) as handler:
            try:
                found = steps[1]
            except AttncoreError:
                refused += 1
        if found is not None:
            seen = {name: (one.host.seq_lens[0], one.host.slot_mapping[0]) for name, one in found.groups.items()}
            assert seen == {"one": (5, 8), "other": (5, 48)}, number
        if not handler.fired:
            break
    assert refused > 5


BUILDS = {
    "one token of each": lambda builder: builder.build(),
    "captured": lambda builder: builder.build(bucket=2),
    "scheduled": lambda builder: builder.build({"a": 2}),
}


def built_or_refused(build, builder):
    """The contexts of the step, by request; None where it was refused."""
    try:
        metadata = build(builder)
    except (ConcurrentUseError, CaptureError, ValueError):
        return None
    return dict(zip(metadata.req_ids, metadata.host.context_lens.tolist(), strict=False))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_no_step_of_another_builder_is_built_behind_steps_ahead(kernels, build):
    refused = 0
    for number in count(step=5 if kernels == "cython" else 17):
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels)
        ahead = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
        ahead.capture(2)
        other = MetadataBuilder(batch, max_num_batched_tokens=8)
        other.capture(2)
        batch.add_request("a", range(1, 9), 3)
        other.build()
        batch.rollback("a", 1)
        with AtOpcode(number, partial(ahead.run_ahead, 3, bucket=2)) as handler:
            contexts = built_or_refused(build, other)
        assert contexts in (None, {"a": 3}), number
        refused += contexts is None
        if not handler.fired:
            break
    assert refused > 5


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_step_that_cuts_a_span_of_a_handlers_is_refused(kernels, build):
    refused = 0
    for number in count(step=1 if kernels == "cython" else 7):
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, spans=True, kernels=kernels)
        builder = MetadataBuilder(batch, max_num_batched_tokens=8)
        builder.capture(2)
        batch.add_request("a", range(1, 9), 3)
        builder.build()
        batch.rollback("a", 1)
        entered = []

        def spans(batch=batch, entered=entered):
            batch.set_spans("a", [(3, 7)])
            entered.append(batch.num_computed_tokens("a"))

        with AtOpcode(number, spans) as handler:
            contexts = built_or_refused(build, builder)
        before = entered == [3]  # the spans were there when the step was built
        assert contexts is None or not before, number
        refused += before
        if not handler.fired:
            break
    assert refused > 5
