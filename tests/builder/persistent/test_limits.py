"""Values at the edge of their types, re-entrant callers, and the lifetime of a step's metadata."""

import threading

import numpy as np
import pytest

from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder, Sequence, SequenceGroup
from attncore.errors import AttncoreError, ConcurrentUseError

HUGE = 2**31 - 1


def group(is_prompt=False, hit=False, **fields):
    whole = {"seq_id": 0, "query_len": 1, "context_len": 3, "block_table": [5]} | fields
    return SequenceGroup(is_prompt, [Sequence(**whole)], hit)


@pytest.mark.parametrize("window", [2**30, HUGE])
def test_a_window_without_end_masks_nothing(kernels, window):
    builder = CommonMetadataBuilder(16, sliding_window=window, chunked_prefill=True, kernels=kernels)
    metadata = builder.build([group(True, query_len=4, context_len=16, block_table=[5, 6]), group()])
    assert metadata.slot_mapping.tolist() == [96, 97, 98, 99, 83]
    assert metadata.seq_lens.tolist() == [20, 4]
    assert metadata.block_table.tolist() == [[5, 6], [5, 0]]


def test_slots_are_64_bits_wide(kernels):
    for block_size in (16, 24):
        builder = CommonMetadataBuilder(block_size, kernels=kernels)
        slots = builder.build([group(block_table=[HUGE])]).slot_mapping.tolist()
        assert slots == [HUGE * block_size + 3]
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=block_size, kernels=kernels)
        batch.add_request("decode", [HUGE], 3)
        batch.add_request("prompt", [HUGE - 1])
        metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build({"prompt": 2})
        first = (HUGE - 1) * block_size
        assert metadata.slot_mapping.tolist() == [HUGE * block_size + 3, first, first + 1]


def test_blocks_as_large_as_they_come(kernels):
    builder = CommonMetadataBuilder(HUGE, sliding_window=HUGE, kernels=kernels)
    metadata = builder.build([group(block_table=[1])])
    assert metadata.slot_mapping.tolist() == [HUGE + 3]
    assert metadata.seq_lens.tolist() == [4]


def test_many_sequences_and_many_ids(kernels):
    """More than the reader's first scratch holds of either."""
    table = list(range(7, 7 + 9000))
    groups = [group(seq_id=i, context_len=i, block_table=table if i == 150 else [i] * 40) for i in range(151)]
    metadata = CommonMetadataBuilder(4, kernels=kernels).build(groups)
    assert metadata.slot_mapping.tolist() == [(table if i == 150 else [i] * 40)[i // 4] * 4 + i % 4 for i in range(151)]
    assert metadata.block_table[150].tolist() == table


def test_padded_tokens_have_rows_of_their_own(kernels):
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=8, kernels=kernels)
    metadata = builder.build([group(), group()], 2)
    assert metadata.token_to_req_indices.tolist() == [0, 1, 2, 3]
    assert metadata.positions.tolist() == [3, 3, 0, 0]


def test_a_first_token_missed_behind_a_window_is_named(kernels):
    builder = CommonMetadataBuilder(4, sliding_window=2, kernels=kernels)
    with pytest.raises(ValueError, match=r"holds 1 block but needs 3 for its 12 tokens .*; append 2"):
        builder.build([group(True, query_len=12, context_len=0)])


def test_sums_that_do_not_fit_are_refused(kernels):
    with pytest.raises(ValueError, match="groups: tokens, lengths or pages of this step do not fit int32"):
        CommonMetadataBuilder(HUGE, kernels=kernels).build([group(context_len=2**30, block_table=[1])] * 3)
    with pytest.raises(ValueError, match="cuda_graph_pad_size: 2147483647 padded requests do not fit int32"):
        CommonMetadataBuilder(4, max_seq_len_to_capture=4, kernels=kernels).build([group()], HUGE)
    batch = InputBatch(max_num_reqs=3, max_model_len=2**30, block_size=2**30, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    for name in "abc":
        batch.add_request(name, [1], 2**30 - 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="seq_lens: their sum over this step does not fit int32"):
            builder.build()
        batch._core.state.dirty = False  # the fast path refuses it too
    assert builder.build({"c": 0}).seq_start_loc.tolist() == [0, 2**30 - 1, 2**31 - 2]


def test_more_decodes_than_a_step_may_have_tokens(kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=8, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=2)
    for name in "ab":
        batch.add_request(name, [1])
    builder.build()
    batch.add_request("c", [1])
    for _ in range(2):
        with pytest.raises(ValueError, match="3 tokens in this step exceed max_num_batched_tokens 2"):
            builder.build()
        batch._core.state.dirty = False


def test_ids_of_an_array_are_bounded_too(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, num_blocks=10, kernels=kernels)
    for dtype in (np.int32, np.int64, np.uint8):
        with pytest.raises(ValueError, match="block id 10 at index 1 is outside"):
            batch.add_request("a", np.array([9, 10], dtype))
        assert not batch.block_table.any()


ODD_TABLES = [
    (iter([5]), "is not a sequence of block ids"),
    (range(2**61 + 1), "range is not a sequence of block ids that can be read"),
    (np.zeros((2, 2), np.int64), r"block id .* at index 0 is not an integer"),
    (["but room for 2147483647"], "block id 'but room for 2147483647' at index 0 is not an integer"),
    (np.array([1, 2], ">i4").astype(">i8") * 2**40, "is outside"),
]


@pytest.mark.parametrize(("table", "message"), ODD_TABLES)
def test_odd_tables_are_refused_by_both_builders(kernels, table, message):
    with pytest.raises((ValueError, TypeError), match=message):
        CommonMetadataBuilder(4, kernels=kernels).build([group(block_table=table)])
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=4, kernels=kernels)
    with pytest.raises((ValueError, TypeError), match=f"{message}|{2**61 + 1} block ids but room for 16 "):
        batch.add_request("a", table)
    assert not batch.block_table.any()


def test_arrays_of_any_order_and_stride_are_read(kernels):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    readonly = np.array([5])
    readonly.flags.writeable = False
    for table in (np.array([5, 9, 6, 9])[::2], np.array([5], ">i4"), np.array([5], np.uint8), readonly):
        assert builder.build([group(block_table=table)]).slot_mapping.tolist() == [23]


def test_an_interrupt_while_ids_are_read_goes_through():
    class Interrupts:
        def __index__(self):
            raise KeyboardInterrupt

    builder = CommonMetadataBuilder(4, kernels="cython")
    with pytest.raises(KeyboardInterrupt):
        builder.build([group(block_table=[Interrupts()])])
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=4, kernels="cython")
    with pytest.raises(KeyboardInterrupt):
        batch.add_request("a", [7, Interrupts()])
    assert batch.num_reqs == 0
    assert not batch.block_table.any()
    assert builder.build([group()]).slot_mapping.tolist() == [23]


def test_a_list_builder_is_entered_once(kernels):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    refused = []

    class ComesBack:
        def __index__(self):
            try:
                builder.build([group(block_table=list(range(10_000)))])
            except ConcurrentUseError as error:
                refused.append(str(error))
            return 5

    assert builder.build([group(block_table=[ComesBack()])]).slot_mapping.tolist() == [23]
    assert len(refused) == 1
    assert builder.build([group()]).slot_mapping.tolist() == [23]


def test_list_builders_in_two_threads(kernels):
    """Builders of their own, at once: each thread gets its own answers."""
    wrong = []

    def work(block):
        builder = CommonMetadataBuilder(4, kernels=kernels)
        for _ in range(200):
            if builder.build([group(block_table=[block])] * 20).slot_mapping.tolist() != [block * 4 + 3] * 20:
                wrong.append(block)

    threads = [threading.Thread(target=work, args=(block,)) for block in (5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_page_indices_are_refused_once_the_blocks_have_moved(kernels):
    batch = InputBatch(max_num_reqs=3, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16, depth=3)
    batch.add_request("a", [1, 2, 3])
    batch.add_request("b", [11, 12, 13], 5)
    metadata = builder.build()
    batch.append_blocks("a", [4])  # moves nothing
    assert metadata.paged_kv_indices.tolist() == [1, 11, 12]
    late = builder.build()
    builder.build({"a": 2})  # moves a behind b
    with pytest.raises(AttncoreError, match="paged_kv_indices: blocks have moved or left"):
        _ = late.paged_kv_indices
    last = builder.build()
    assert last.paged_kv_indices.tolist() == [11, 12, 13, 1, 2]
    batch.remove_request("a")
    with pytest.raises(AttncoreError, match="paged_kv_indices"):
        _ = last.decode_metadata.paged_kv_indices


def test_a_callers_scribbling_does_not_reach_the_counts(kernels):
    batch = InputBatch(max_num_reqs=3, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16, depth=1)
    batch.add_request("a", [1, 2, 3])
    builder.build().host._own("query_start_loc")[:] = -9
    metadata = builder.build({"a": 2})
    assert (metadata.num_tokens, metadata.slot_mapping.tolist()) == (2, [5, 6])


def zeroes_and_refuses(metadata, out):
    """Fills a field of an engine's: scribbles over the step, as a tensor on a CPU lets it, and fails."""
    metadata.host._own("query_lens")[:] = 0
    metadata.host._own("context_lens")[:] = 0
    if "encoder" in metadata.groups:
        metadata.host._own("encoder_query_lens")[:] = 0
    raise RuntimeError("the engine's values are missing")


@pytest.mark.parametrize("scheduled", [{"a": 2}, {"a": 2, "b": 3, "c": 1}, {}, {"b": 0}])
def test_a_roll_back_does_not_read_what_was_scribbled_over(kernels, scheduled):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    for index, name in enumerate("abc"):
        batch.add_request(name, [3 * index + block for block in (1, 2, 3)], 3 + index)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)
    builder.register_field("extra", np.int32, "request", zeroes_and_refuses)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="values are missing"):
            builder.build(scheduled)
        assert [batch.num_computed_tokens(name) for name in "abc"] == [3, 4, 5]
        assert builder.last_step == -1


def test_an_encoder_that_was_taken_back_runs_again(kernels):
    groups = [KVCacheGroup("full", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups, max_encoder_len=12, kernels=kernels)
    batch.add_request("a", {"full": [1, 2], "encoder": [3, 4]}, encoder_seq_len=5)
    batch.add_request("b", {"full": [5, 6], "encoder": [7]}, encoder_seq_len=2, encoder_computed=True)
    builder, fill = MetadataBuilder(batch, max_num_batched_tokens=16), zeroes_and_refuses
    builder.register_field("extra", np.int32, "request", lambda metadata, out: fill(metadata, out))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="values are missing"):
            builder.build({"b": 2})
    fill = lambda metadata, out: None  # noqa: E731
    metadata = builder.build({"b": 2})
    row = metadata.req_ids.index("a")
    assert metadata.encoder_query_lens.tolist() == [5 if index == row else 0 for index in range(2)]
    assert metadata.cross_slot_mapping.tolist() == [12, 13, 14, 15, 16]
    metadata.host._own("encoder_query_lens")[:] = 5
    builder.build().host._own("encoder_query_lens")[:] = 5
    fill = zeroes_and_refuses
    with pytest.raises(RuntimeError, match="values are missing"):
        builder.build()  # no encoder ran: none is taken back
    fill = lambda metadata, out: None  # noqa: E731
    assert builder.build().encoder_query_lens.tolist() == [0, 0]


def test_every_view_has_every_count(kernels):
    builder = CommonMetadataBuilder(4, "flash", chunked_prefill=True, max_seq_len_to_capture=64, kernels=kernels)
    decode = builder.build([group(query_len=2, context_len=2)], 1).decode_metadata
    assert (decode.use_cuda_graph, decode.max_decode_query_len) == (True, 2)
    prefill = builder.build([group(True, query_len=4, context_len=0), group()]).prefill_metadata
    assert (prefill.use_cuda_graph, prefill.max_decode_query_len) == (False, 1)
    fields = builder.build([group()]).asdict_zerocopy()
    assert (fields["use_cuda_graph"], fields["max_decode_query_len"]) == (False, 1)


ODD_CALLS = [
    (lambda b, m: b.add_request([], [5]), r"req_id: \[\] cannot name a request"),
    (lambda b, m: b.remove_request([]), r"req_id: \[\] cannot name a request"),
    (lambda b, m: b.append_blocks_many([("a", [5])]), "block_ids: .* is not a mapping"),
    (lambda b, m: m.build([1]), r"scheduled: \[1\] is not a mapping"),
    (lambda b, m: m.build(5), "scheduled: 5 is not a mapping"),
    (lambda b, m: MetadataBuilder(None, max_num_batched_tokens=4), "batch: None is not an InputBatch"),
    (lambda b, m: MetadataBuilder(b, "flash", max_num_batched_tokens=4), "backend: 'flash' is not a backend"),
]


@pytest.mark.parametrize(("call", "message"), ODD_CALLS)
def test_odd_arguments_name_themselves(kernels, call, message):
    batch = InputBatch(max_num_reqs=3, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)
    with pytest.raises(TypeError, match=message):
        call(batch, builder)


@pytest.mark.parametrize("depth", [2**20, 2**31 - 1])
def test_more_memory_than_an_address_can_say_is_a_memory_error(kernels, depth):
    batch = InputBatch(max_num_reqs=1, max_model_len=16, block_size=4, kernels=kernels)
    with pytest.raises(MemoryError):
        MetadataBuilder(batch, max_num_batched_tokens=2**31 - 1, depth=depth)


def test_far_more_block_ids_than_there_is_room_for_are_not_read(kernels):
    """To read them would take 40 GB, and a minute."""
    batch = InputBatch(max_num_reqs=1, max_model_len=16, block_size=4, kernels=kernels)
    with pytest.raises(ValueError, match=r"request 'a': 1000000000 block ids but room for 4 \(max_model_len 16"):
        batch.add_request("a", range(10**9))
    with pytest.raises(TypeError, match="request 'a': range is not a sequence of block ids that can be read"):
        batch.add_request("a", range(10**30))
