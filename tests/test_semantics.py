"""The worked numbers of the semantics, part one."""

import numpy as np
import pytest

from attncore import slots
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup


def prompt(query_len, context_len, table, hit=False):
    return SequenceGroup(True, [Sequence(0, query_len, context_len, table)], hit)


def decode(seq_len, table, query_len=1):
    return SequenceGroup(False, [Sequence(0, query_len, seq_len - query_len, table)])


def encoded(group, encoder_seq_len, cross_block_table):
    return group._replace(encoder_seq_len=encoder_seq_len, cross_block_table=cross_block_table)


def test_start_index_is_compared_with_the_absolute_index():
    assert slots.compute_slot_mapping_start_idx(True, 10, 20, 8) == 2
    assert slots.compute_slot_mapping_start_idx(True, 10, 0, None) == 0
    assert slots.compute_slot_mapping_start_idx(False, 10, 20, 8) == 0


def test_slots_of_a_windowed_prompt(kernels):
    metadata = CommonMetadataBuilder(4, sliding_window=8, kernels=kernels).build([prompt(10, 0, [0, 1, 0])])
    assert metadata.slot_mapping.tolist() == [-1, -1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_slots_of_a_chunk(kernels):
    metadata = CommonMetadataBuilder(4, chunked_prefill=True, kernels=kernels).build([prompt(4, 6, [3, 1, 2])])
    assert metadata.slot_mapping.tolist() == [6, 7, 8, 9]


def test_a_later_chunk_masks_nothing(kernels):
    builder = CommonMetadataBuilder(4, sliding_window=8, chunked_prefill=True, kernels=kernels)
    assert -1 not in builder.build([prompt(10, 20, list(range(8)))]).slot_mapping


def test_a_profiling_run_pads_the_query_only(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", chunked_prefill=True, kernels=kernels)
    metadata = builder.build([prompt(3, 2, None)])
    assert metadata.slot_mapping.tolist() == [-1, -1, -1]
    assert metadata.block_table.shape == (1, 0)
    assert metadata.paged_kv_indptr.tolist() == [0, 0]
    assert metadata.paged_kv_last_page_len.tolist() == [0]


def test_windowed_decode(kernels):
    metadata = CommonMetadataBuilder(4, sliding_window=8, kernels=kernels).build([decode(14, [1, 2, 3, 4])])
    assert metadata.seq_lens.tolist() == [10]
    assert metadata.block_table.tolist() == [[2, 3, 4]]
    assert metadata.slot_mapping.tolist() == [17]


def test_lookahead_blocks_do_not_shift_a_windowed_row(kernels):
    metadata = CommonMetadataBuilder(4, sliding_window=8, kernels=kernels).build([decode(14, [1, 2, 3, 4, 5, 6])])
    assert metadata.block_table.tolist() == [[2, 3, 4]]


def test_plain_prefill_has_an_empty_rectangle(kernels):
    metadata = CommonMetadataBuilder(4, kernels=kernels).build([prompt(5, 0, [1, 2]), prompt(3, 0, [3])])
    assert metadata.block_table.shape == (2, 0)


@pytest.mark.parametrize(("layout", "rows"), [("common", [[0, 0], [1, 2]]), ("flash", [[3, 0], [1, 2]])])
def test_one_hit_gives_flash_every_table(kernels, layout, rows):
    builder = CommonMetadataBuilder(4, layout, kernels=kernels)
    metadata = builder.build([prompt(3, 0, [3]), prompt(5, 2, [1, 2], hit=True)])
    assert metadata.block_table.tolist() == rows


def test_graph_padding(kernels):
    groups = [decode(5, [4, 6]), decode(9, [9, 2, 7]), decode(4, [5])]
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16, kernels=kernels)
    metadata = builder.build(groups, cuda_graph_pad_size=1)
    assert metadata.slot_mapping.tolist() == [24, 28, 23, -1]
    assert metadata.seq_lens.tolist() == [5, 9, 4, 1]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3]
    assert metadata.seq_start_loc.tolist() == [0, 5, 14, 18, 19]
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 5, 6, 6]
    assert metadata.paged_kv_last_page_len.tolist() == [1, 1, 4, 0]
    assert metadata.block_table.tolist() == [[4, 6, 0, 0], [9, 2, 7, 0], [5, 0, 0, 0], [0, 0, 0, 0]]
    assert metadata.num_decode_tokens == 4
    assert metadata.use_cuda_graph


def test_a_pad_of_zero_is_a_graph(kernels):
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=16, kernels=kernels)
    metadata = builder.build([decode(5, [4, 6])], cuda_graph_pad_size=0)
    assert metadata.block_table.shape == (1, 4)
    assert metadata.use_cuda_graph


@pytest.mark.parametrize("layout", ["flash", "flashinfer"])
def test_a_graph_cuts_lookahead_blocks_only(kernels, layout):
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=8, kernels=kernels)
    assert builder.build([decode(8, [1, 2, 3])], 0).block_table.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="max_seq_len_to_capture: 8 is below the length 9"):
        builder.build([decode(9, [1, 2, 3])], 0)


@pytest.mark.parametrize("layout", ["common", "rocm"])
def test_a_wide_row_is_an_error_elsewhere(kernels, layout):
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=8, kernels=kernels)
    with pytest.raises(ValueError, match=r"groups\[0\].sequences\[0\].block_table: 3 blocks exceed the 2 columns"):
        builder.build([decode(8, [1, 2, 3])], 0)


def test_page_lists_take_the_whole_table_and_the_true_length(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", sliding_window=4, kernels=kernels)
    metadata = builder.build([prompt(6, 0, [8, 9]), decode(14, [1, 2, 3, 4, 5])])
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 6]
    assert metadata.paged_kv_indices.tolist() == [8, 9, 1, 2, 3, 4]
    assert metadata.paged_kv_last_page_len.tolist() == [2, 2]


def test_views_start_at_zero(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", chunked_prefill=True, kernels=kernels)
    metadata = builder.build([prompt(5, 3, [4, 6]), decode(9, [9, 2, 7]), decode(4, [5])])
    view = metadata.decode_metadata
    assert view is metadata.decode_metadata
    assert view.query_start_loc.tolist() == [0, 1, 2]
    assert view.seq_start_loc.tolist() == [0, 9, 13]
    assert view.slot_mapping.tolist() == [28, 23]
    assert view.block_table.tolist() == [[9, 2, 7], [5, 0, 0]]
    assert view.paged_kv_indptr.tolist() == [0, 3, 4]
    assert view.paged_kv_indices.tolist() == [9, 2, 7, 5]
    assert view.token_to_req_indices.tolist() == [0, 1]
    assert view.logits_indices.tolist() == [0, 1]
    assert (view.num_reqs, view.num_tokens, view.num_prefills, view.num_decodes) == (2, 2, 0, 2)
    prefill = metadata.prefill_metadata
    assert prefill.query_start_loc.tolist() == [0, 5]
    assert prefill.slot_mapping.tolist() == [19, 24, 25, 26, 27]
    assert (prefill.num_reqs, prefill.max_query_len, prefill.num_decode_tokens) == (1, 5, 0)
    assert builder.build([decode(4, [5])]).prefill_metadata is None
    assert builder.build([prompt(4, 0, [5])]).decode_metadata is None


def test_the_decode_view_of_a_padded_batch_holds_the_padding(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16, kernels=kernels)
    view = builder.build([decode(5, [4, 6]), decode(4, [5])], 2).decode_metadata
    assert view.seq_lens.tolist() == [5, 4, 1, 1]
    assert view.slot_mapping.tolist() == [24, 23, -1, -1]
    assert view.block_table.shape == (4, 4)
    assert view.paged_kv_indptr.tolist() == [0, 2, 3, 3, 3]
    assert view.query_start_loc.tolist() == [0, 1, 2]


def test_asdict_zerocopy_shares_memory_and_leaves_the_callers_set(kernels):
    metadata = CommonMetadataBuilder(4, kernels=kernels).build([decode(5, [4, 6])])
    skip = {"seq_lens"}
    fields = metadata.asdict_zerocopy(skip)
    assert skip == {"seq_lens"}
    assert "seq_lens" not in fields
    assert fields["num_decode_tokens"] == 1
    assert np.shares_memory(fields["slot_mapping"], metadata.slot_mapping)
    assert "paged_kv_indptr" not in fields


def test_prompts_of_an_encoder_decoder_model(kernels):
    """All encoder tokens have slots; there is no cross table."""
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    groups = [encoded(prompt(2, 0, [5]), 6, [7, 9]), encoded(prompt(1, 0, [8]), 3, [4])]
    metadata = builder.build(groups)
    assert metadata.encoder_seq_lens.tolist() == [6, 3]
    assert metadata.encoder_seq_start_loc.tolist() == [0, 6, 9]
    assert (metadata.num_encoder_tokens, metadata.max_encoder_seq_len) == (9, 6)
    assert metadata.cross_slot_mapping.tolist() == [28, 29, 30, 31, 36, 37, 16, 17, 18]
    assert metadata.cross_block_tables.shape == (2, 0)
    profiled = builder.build([encoded(prompt(2, 0, None), 3, None)])
    assert profiled.cross_slot_mapping.tolist() == [-1, -1, -1]


def test_decodes_of_an_encoder_decoder_model(kernels):
    """No slots; tables padded with 0, under a graph to a fixed width, with lengths of 1."""
    builder = CommonMetadataBuilder(4, encoder_decoder=True, max_seq_len_to_capture=16, kernels=kernels)
    groups = [encoded(decode(5, [4, 6]), 6, [7, 9]), encoded(decode(4, [5]), 3, [4])]
    metadata = builder.build(groups)
    assert metadata.cross_slot_mapping.tolist() == []
    assert metadata.cross_block_tables.tolist() == [[7, 9], [4, 0]]
    padded = builder.build(groups, 1)
    assert padded.encoder_seq_lens.tolist() == [6, 3, 1]
    assert padded.encoder_seq_start_loc.tolist() == [0, 6, 9, 10]
    assert padded.cross_block_tables.tolist() == [[7, 9, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert (padded.num_encoder_tokens, padded.max_encoder_seq_len) == (9, 6)


def test_views_have_the_encoder_fields_whole(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    metadata = builder.build([encoded(prompt(2, 0, [5]), 6, [7, 9]), encoded(decode(4, [5]), 3, [4])])
    for view in (metadata.prefill_metadata, metadata.decode_metadata):
        assert view.num_reqs == 1
        assert view.num_encoder_tokens == 9
        assert view.encoder_seq_lens.tolist() == [6, 3]
        assert view.encoder_seq_start_loc.tolist() == [0, 6, 9]
        assert len(view.cross_slot_mapping) == 6
        assert view.cross_block_tables.tolist() == [[0], [4]]
