"""Chunked local attention as virtual batches, against plain Python and against dense attention with a local mask."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.abstract import BackendConfig
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    local_attention_batches,
    local_attention_metadata,
)
from attncore.reference import ReferenceBackend


def virtual_rows(query_lens, seq_lens, tables, chunk, block_size):
    """(request, chunk, query length, key length, blocks) of every virtual request, token by token."""
    found = {}
    for row, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for token in range(length - query, length):
            key = row, token // chunk
            queries, _ = found.get(key, (0, 0))
            found[key] = queries + 1, token % chunk + 1
    return [
        (row, index, queries, keys, [
            tables[row][token // block_size] for token in range(index * chunk, index * chunk + keys, block_size)
        ])
        for (row, index), (queries, keys) in found.items()
    ]  # fmt: skip


def test_the_worked_numbers():
    virtual = local_attention_batches([4, 10, 5], [6, 17, 9], np.arange(27).reshape(3, 9), 4, 2)
    assert virtual.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert virtual.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert virtual.query_start_loc.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert virtual.seq_start_loc.tolist() == [0, 4, 6, 10, 14, 18, 19, 23, 24]
    assert virtual.block_table.tolist() == [
        [0, 1], [2, 0], [11, 12], [13, 14], [15, 16], [17, 0], [20, 21], [22, 0],
    ]  # fmt: skip
    assert virtual.request_indices.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert virtual.chunk_indices.tolist() == [0, 1, 1, 2, 3, 4, 1, 2]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=5),
    block_size=st.integers(1, 4),
    blocks_per_chunk=st.integers(1, 3),
)
def test_every_chunk_is_the_oracles(rows, block_size, blocks_per_chunk):
    queries, lens = [q for q, _ in rows], [q + c for q, c in rows]
    width = oracles.cdiv(max(lens, default=0), block_size)
    tables = np.arange(1, len(rows) * width + 1).reshape(len(rows), width)
    chunk = block_size * blocks_per_chunk
    virtual = local_attention_batches(queries, lens, tables, chunk, block_size)
    expected = virtual_rows(queries, lens, tables.tolist(), chunk, block_size)
    found = zip(
        *(virtual._asdict()[name].tolist() for name in ("request_indices", "chunk_indices", "query_lens", "seq_lens")),
        virtual.block_table.tolist(),
        strict=True,
    )
    assert list(found) == [(*row[:4], row[4] + [0] * (blocks_per_chunk - len(row[4]))) for row in expected]
    assert virtual.query_start_loc.tolist() == oracles.sums(virtual.query_lens.tolist())
    assert virtual.seq_start_loc.tolist() == oracles.sums(virtual.seq_lens.tolist())
    assert {array.dtype for array in virtual} == {np.dtype(np.int32)}


CHUNK, BLOCK = 8, 4
CONFIG = BackendConfig(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=BLOCK, device="cpu")


def local_dense(query, key, value, scale):
    """Attention of the last tokens over all keys with the mask written out: own chunk, not later."""
    keys = torch.arange(len(key))
    queries = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
    visible = (keys // CHUNK == queries // CHUNK) & (keys <= queries)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    score = torch.einsum("qhd,khd->hqk", query, key) * scale
    weight = score.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weight, value)


def test_the_reference_backend_runs_it_as_any_other_batch():
    torch.manual_seed(3)
    backend = ReferenceBackend(CONFIG)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    contexts, scheduled = {"a": 6, "b": 16, "c": 0, "d": 31}, {"a": 10, "b": 1, "c": 21, "d": 1}
    ids = iter(torch.randperm(40).add(1).tolist())
    whole, kv_cache = {}, backend.allocate_kv_cache(41)
    for name, context in contexts.items():
        length = context + scheduled[name]
        blocks = [next(ids) for _ in range(oracles.cdiv(length, BLOCK))]
        batch.add_request(name, blocks, context)
        whole[name] = torch.randn(length, 2, 8), torch.randn(length, 2, 8)
        for token in range(context):
            for cache, rows in zip(kv_cache, whole[name], strict=True):
                cache[blocks[token // BLOCK], token % BLOCK] = rows[token]
    metadata = builder.build(scheduled)
    local = local_attention_metadata(metadata, CHUNK, BLOCK)
    query = torch.randn(metadata.num_tokens, 4, 8)
    key, value = (torch.cat([whole[name][i][contexts[name] :] for name in metadata.req_ids]) for i in (0, 1))
    out = backend.impl("layer", scale=0.3).forward(query, key, value, kv_cache, local)
    for row, name in enumerate(metadata.req_ids):
        tokens = slice(*metadata.host.query_start_loc[row : row + 2].tolist())
        torch.testing.assert_close(out[tokens], local_dense(query[tokens], *whole[name], 0.3))
    assert local.req_ids == ("d", "b", "c", "c", "c", "a", "a")
    assert local.decode_metadata.num_reqs == local.num_decodes == 2
    assert local.decode_metadata.seq_lens.tolist() == [8, 1]
    assert local.prefill_metadata.seq_lens.tolist() == [8, 8, 5, 8, 8]
    assert (local.max_decode_seq_len, local.max_prefill_seq_len, local.max_query_len) == (8, 8, 8)
    assert local.logits_indices.tolist() == [0, 1, 9, 17, 22, 24, 32]
    assert local.paged_kv_last_page_len.tolist() == [4, 1, 4, 4, 1, 4, 4]
    assert local.token_to_req_indices.tolist() == oracle_rows(local.query_lens.tolist())


def oracle_rows(query_lens):
    return [row for row, count in enumerate(query_lens) for _ in range(count)]


def test_plain_prompts_of_the_list_builder_need_no_table():
    metadata = CommonMetadataBuilder(2).build([SequenceGroup(True, [Sequence(0, 5, 0, [4, 7, 9])])])
    assert metadata.block_table.shape == (1, 0)
    local = local_attention_metadata(metadata, 4, 2)
    assert local.query_lens.tolist() == local.seq_lens.tolist() == [4, 1]
    assert local.slot_mapping.tolist() == [8, 9, 14, 15, 18]
    assert (local.num_prefills, local.num_decodes, local.from_groups) == (2, 0, True)


def test_plain_prompts_of_the_list_builder_have_the_pages_of_their_chunks():
    """Also where they have no table: the step's page lists know their blocks."""
    groups = [
        SequenceGroup(True, [Sequence(0, 5, 0, [4, 7, 9])]),
        SequenceGroup(False, [Sequence(1, 1, 6, [3, 6, 2, 8])]),
    ]
    metadata = CommonMetadataBuilder(2, "flashinfer").build(groups)
    assert metadata.block_table[0].tolist() == [0, 0, 0, 0]
    local = local_attention_metadata(metadata, 4, 2)
    assert local.seq_lens.tolist() == [4, 1, 3]
    assert local.paged_kv_indptr.tolist() == [0, 2, 3, 5]
    assert local.paged_kv_indices.tolist() == [4, 7, 9, 2, 8]
    assert local.paged_kv_last_page_len.tolist() == [2, 1, 1]


@pytest.mark.parametrize(("block_size", "pages"), [(1, 5), (4, 2)])
def test_pages_of_another_block_size_are_refused(block_size, pages):
    """Plain prompts have no table that would be too short."""
    metadata = CommonMetadataBuilder(2, "flashinfer").build([SequenceGroup(True, [Sequence(0, 5, 0, [4, 7, 9])])])
    error = f"^block_size: {block_size} found, but row 0 has 5 tokens in 3 pages, not {pages}; give the block size"
    with pytest.raises(ValueError, match=error):
        local_attention_metadata(metadata, 4, block_size)


def test_a_profiling_run_of_the_list_builder_has_no_pages():
    metadata = CommonMetadataBuilder(2, "flashinfer").build([SequenceGroup(True, [Sequence(0, 5, 0, None)])])
    local = local_attention_metadata(metadata, 4, 2)
    assert local.seq_lens.tolist() == [4, 1]
    assert local.paged_kv_indptr.tolist() == [0, 0, 0]
    assert local.paged_kv_last_page_len.tolist() == [0, 0]
    assert not len(local.paged_kv_indices)


def list_step(pad=-1, **options):
    builder = CommonMetadataBuilder(2, max_seq_len_to_capture=16, **options)
    return builder.build([SequenceGroup(False, [Sequence(0, 1, 8, [1, 2, 3, 4, 5])])], pad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: local_attention_batches([1], [1], [[1]], 5, 2), "chunk_size: 5 is no multiple of block_size 2"),
        (lambda: local_attention_batches([1], [1], [[1]], 0, 2), "chunk_size: 0 is below 1"),
        (lambda: local_attention_batches([1], [1], [[1]], 4, 0), "block_size: 0 is below 1"),
        (lambda: local_attention_batches([1, 1], [1], [[1]], 4, 2), "seq_lens: 1 length for 2 requests"),
        (lambda: local_attention_batches([3], [2], [[1]], 4, 2), "seq_lens: row 0 has 2 tokens, fewer than its 3"),
        (lambda: local_attention_batches([1], [2], [[1], [2]], 4, 2), "block_table: 2 rows for 1 request"),
        (lambda: local_attention_batches([1], [2], [1], 4, 2), r"block_table: int64\[1\]"),
        (lambda: local_attention_batches([1], [2], [[-1]], 4, 2), "block_table: block id -1"),
        (
            lambda: local_attention_batches([1], [7], [[1, 2, 3]], 4, 2),
            "block_table: row 0 holds 3 blocks but needs 4 up to chunk 1",
        ),
        (
            lambda: local_attention_batches([1], [1], [[0]], 2**31 - 1, 1),
            "chunk_size: 1 chunk of 2147483647 blocks each, more than .*; give a smaller one",
        ),
        (
            lambda: local_attention_batches([2**31 - 1] * 3, [2**31 - 1] * 3, [[1]] * 3, 1, 1),
            "chunk_size: 6442450941 chunks of 1 block each, more than 1048576 chunks .*; give a larger one",
        ),
        (lambda: local_attention_batches([2**20 + 1], [2**20 + 1], [[1]], 1, 1), "chunk_size: 1048577 chunks"),
        (lambda: local_attention_metadata(list_step(1), 4, 2), "metadata: padded for a graph"),
        (lambda: local_attention_metadata(list_step(sliding_window=4), 4, 2), "metadata: row 0 has a length capped"),
    ],
)
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
