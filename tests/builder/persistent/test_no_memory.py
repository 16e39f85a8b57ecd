"""A call that finds no memory has changed nothing, or has happened: one failed allocation after the other."""

from contextlib import suppress

import numpy as np
import pytest

from attncore.builder import (
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    SharedPrefix,
    local_attention_metadata,
    plan_cascade,
    state_chunks,
)

_testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi, which makes allocations fail")


def without_memory(start, stop, call, *args, **options):
    """A call in which the allocations from number ``start`` up to ``stop`` fail."""
    _testcapi.set_nomemory(start, stop)
    try:
        call(*args, **options)
    except (MemoryError, SystemError):  # the latter of NumPy, whose view() returns NULL without an error
        pass
    finally:
        _testcapi.remove_mem_hooks()


def padded_builder():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    builder.capture(4)
    batch.add_request("a", [1, 2, 3], 5)
    builder.build(bucket=4)
    builder.build(bucket=4)
    return batch, builder


@pytest.mark.parametrize("start", range(6))
def test_a_padded_step_is_built_and_copied_or_is_not(start):
    batch, builder = padded_builder()
    without_memory(start, start + 1, builder.build, bucket=4)
    metadata = builder.last_metadata
    assert builder.last_step == batch.num_computed_tokens("a") - 5
    np.testing.assert_array_equal(metadata.seq_lens, metadata.host.seq_lens)
    np.testing.assert_array_equal(metadata.slot_mapping, metadata.host.slot_mapping)
    assert metadata.host.seq_lens[0] == batch.num_computed_tokens("a")


@pytest.mark.parametrize("start", range(16))
def test_what_is_taken_back_is_taken_back_once(start):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    batch.add_request("a", [1, 2], 5)
    batch.add_request("b", [3, 4, 5], 9)
    without_memory(start, start + 5, batch.swap_rows, 0, 1)
    assert (batch.block_ids("a"), batch.num_computed_tokens("a")) == ([1, 2], 5)
    assert (batch.block_ids("b"), batch.num_computed_tokens("b")) == ([3, 4, 5], 9)


@pytest.mark.parametrize("start", range(16))
def test_an_array_of_the_host_is_no_array_of_objects(start):
    _, builder = padded_builder()
    metadata = builder.last_metadata
    assert metadata.host.seq_lens[0]  # first: what the first access imports
    without_memory(start, start + 1, getattr, metadata.host, "positions")
    assert metadata.host.positions.dtype == np.int64


@pytest.mark.parametrize("start", range(60))
def test_spans_and_token_columns_survive_it(start):
    """NumPy crashes where it finds no memory to cast an index in: places are indices already."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, spans=True, kernels="cython")
    tokens = batch.token_column("ids", unknown=-1, width=16)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32)
    builder.register_column(tokens)
    for name in "abc":
        batch.add_request(name, [1, 2, 3, 4], 1)
        batch.set_spans(name, [(2, 4), (5, 9)])
    builder.build(query_len=3)
    without_memory(start, start + 1, tokens.leave, builder.last_metadata)
    without_memory(start, start + 1, builder.build, query_len=5)
    assert [batch.num_computed_tokens(name) for name in "abc"] == [4 + 5 * builder.last_step] * 3


def without_an_allocation(start, call, *args, **options):
    """``without_memory`` of one allocation, whatever error it is told as."""
    with suppress(TypeError, ValueError):
        without_memory(start, start + 1, call, *args, **options)


def step_of_two():
    """A step of a prompt and a decode."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    builder = MetadataBuilder(batch, max_num_batched_tokens=32)
    batch.add_request("a", [1, 2, 3, 4, 5, 6], 3)
    batch.add_request("b", [7, 8, 9], 7)
    return builder.build({"a": 7})


MADE_OF_A_STEP = {
    "chunks": lambda step: local_attention_metadata(step, 8, 4),
    "rank": lambda step: ContextParallel(2, 1, 2).metadata(step),
    "cascade": lambda step: plan_cascade(
        SharedPrefix(np.array([0, 1], np.int32), 1, 4), [[7, 8, 1], [7, 8, 3]], [1, 2], [9, 12]
    ),
    "chunks of states": lambda step: state_chunks(step.query_lens, 4, step.context_lens),
}


@pytest.mark.parametrize("made", MADE_OF_A_STEP)
def test_what_is_made_of_a_step_survives_it(made):
    """As above: nothing is read by an index that NumPy casts."""
    step = step_of_two()
    expected = MADE_OF_A_STEP[made](step)
    for start in range(150):
        without_an_allocation(start, MADE_OF_A_STEP[made], step)
    np.testing.assert_equal(arrays_of(MADE_OF_A_STEP[made](step)), arrays_of(expected))


def arrays_of(made):
    return made.asdict_zerocopy() if hasattr(made, "asdict_zerocopy") else made._asdict()


def test_a_path_that_is_kept_survives_it():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, decode_threshold=8, draft_trees=True)
    batch.add_request("a", [1, 2, 3], 2)
    for start in range(120):
        builder.build(trees={"a": [-1, -1, 0, 1]})
        without_an_allocation(start, builder.keep_paths, {"a": [1, 3]})
        assert batch.num_computed_tokens("a") in (5, 7)
        batch.rollback("a", batch.num_computed_tokens("a") - 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators that end without memory
def test_steps_ahead_that_are_stopped_survive_it():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    builder.capture(4)
    for name in "abc":
        batch.add_request(name, [1, 2, 3], 2)
    for start in range(60):
        steps = builder.run_ahead(2, bucket=4)
        without_an_allocation(start, steps.stop)
        assert steps.stop() == 0
        assert [batch.num_computed_tokens(name) for name in "abc"] == [2, 2, 2]


def test_a_windowed_step_that_advances_survives_it():
    builder = CommonMetadataBuilder(4, "flash", sliding_window=6, kernels="cython")
    for start in range(220):
        step = builder.build([SequenceGroup(False, [Sequence(0, 1, 7 + k, [*range(9)])]) for k in range(4)])
        for _ in range(6):
            without_an_allocation(start, step.advance_step)
        counts = step.context_lens - [7, 8, 9, 10]
        assert counts.tolist() == [step.advanced] * 4
