"""The oracle, against numbers worked out by hand, and against faults planted in real metadata."""

from types import SimpleNamespace

import numpy as np
import pytest

from attncore.builder import ContextParallel, InputBatch, MetadataBuilder
from attncore.replay.checks.metadata_check import differences
from attncore.replay.checks.oracle import COUNTS, FIELDS, PlannedRow, Shard, expected

# A decode (its 9th token) and a prompt chunk (tokens 3 .. 7), blocks of 4.
ROWS = [PlannedRow(8, 1, [9, 2, 7]), PlannedRow(3, 5, [4, 6])]


def test_expected_by_hand():
    assert expected(ROWS, 4) == {
        "slot_mapping": [28, 19, 24, 25, 26, 27],
        "positions": [8, 3, 4, 5, 6, 7],
        "token_to_req_indices": [0, 1, 1, 1, 1, 1],
        "query_start_loc": [0, 1, 6],
        "seq_start_loc": [0, 9, 17],
        "seq_lens": [9, 8],
        "context_lens": [8, 3],
        "query_lens": [1, 5],
        "logits_indices": [0, 5],
        "paged_kv_indptr": [0, 3, 5],
        "paged_kv_indices": [9, 2, 7, 4, 6],
        "paged_kv_last_page_len": [1, 4],
        "num_reqs": 2,
        "num_tokens": 6,
        "num_decodes": 1,
        "num_decode_tokens": 1,
        "num_prefills": 1,
        "num_prefill_tokens": 5,
        "max_query_len": 5,
        "max_seq_len": 9,
        "max_prefill_seq_len": 8,
        "max_decode_seq_len": 9,
        "max_decode_query_len": 1,
    }


def built():
    """Real metadata of ROWS, its host fields copied so that a test may change one."""
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=4)
    batch.add_request("prompt", [4, 6], num_computed_tokens=3)
    batch.add_request("decode", [9, 2, 7], num_computed_tokens=8)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=16).build({"prompt": 5})
    fields = (*FIELDS, "block_table")
    host = SimpleNamespace(**{name: getattr(metadata.host, name).copy() for name in fields})
    counts = {name: getattr(metadata, name) for name in COUNTS}
    return SimpleNamespace(host=host, req_ids=metadata.req_ids, **counts)


PLANNED = {"prompt": ROWS[1], "decode": ROWS[0]}


def test_the_builder_agrees():
    assert differences(built(), PLANNED, 4) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_number_in_any_field_is_named(name):
    metadata = built()
    getattr(metadata.host, name)[-1] += 1
    [sentence] = differences(metadata, PLANNED, 4)
    assert sentence.startswith(f"{name}: [")
    assert "1 of" in sentence


@pytest.mark.parametrize("name", COUNTS)
def test_a_wrong_count_is_named(name):
    metadata = built()
    setattr(metadata, name, getattr(metadata, name) + 1)
    [sentence] = differences(metadata, PLANNED, 4)
    assert sentence.startswith(f"{name}: ")


@pytest.mark.parametrize("name", [*FIELDS, "block_table"])
def test_another_dtype_or_shape_is_named(name):
    metadata = built()
    setattr(metadata.host, name, getattr(metadata.host, name).astype(np.int16))
    assert differences(metadata, PLANNED, 4)[0].startswith(f"{name}: int16")
    metadata = built()
    setattr(metadata.host, name, getattr(metadata.host, name)[:-1])
    assert differences(metadata, PLANNED, 4)[0].startswith(f"{name}: ")


@pytest.mark.parametrize(("row", "column", "block"), [(0, 0, 5), (0, 2, 0), (1, 1, 9), (1, 3, 8)])
def test_a_wrong_block_in_the_table_is_named(row, column, block):
    metadata = built()
    metadata.host.block_table[row, column] = block
    [sentence] = differences(metadata, PLANNED, 4)
    assert sentence.startswith(f"block_table: row {row} is ")


def test_a_table_may_hold_the_blocks_that_come_next():
    assert differences(built(), {**PLANNED, "decode": PlannedRow(8, 1, [9, 2, 7, 5])}, 4) == []


def test_other_requests_and_another_order_are_named():
    assert differences(built(), {"prompt": ROWS[1]}, 4)[0].startswith("req_ids")
    assert differences(built(), {"prompt": ROWS[1], "other": ROWS[0]}, 4)[0].startswith("req_ids")
    turned = {"prompt": ROWS[0], "decode": ROWS[1]}
    assert differences(built(), turned, 4) == ["req_ids: a decode stands after a prefill"]


def test_more_tokens_are_a_decode_with_drafts():
    found = expected([PlannedRow(8, 3, [9, 2, 7]), PlannedRow(3, 5, [4, 6])], 4, threshold=3)
    assert (found["num_decodes"], found["num_decode_tokens"], found["max_decode_query_len"]) == (1, 3, 3)
    assert (found["num_prefills"], found["num_prefill_tokens"], found["max_decode_seq_len"]) == (1, 5, 11)


def test_a_rank_by_hand():
    rows = [PlannedRow(0, 10, [5, 9, 2]), PlannedRow(6, 3, [7, 3, 8])]
    found = expected(rows, 4, shard=Shard(2, 0, 1))
    assert found["slot_mapping"] == [20, -1, 21, -1, 22, -1, 23, -1, 36, -1, 31, -1, 12]
    assert (found["seq_lens"], found["context_lens"]) == ([5, 5], [0, 3])
    assert (found["paged_kv_indices"], found["paged_kv_last_page_len"]) == ([5, 9, 7, 3], [1, 1])
    assert expected(rows, 4, shard=Shard(2, 1, 2))["slot_mapping"][:10] == [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1]


def test_a_rank_that_is_another_is_named():
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=8)
    batch.add_request("prompt", [4, 6], num_computed_tokens=3)
    ranks = ContextParallel(2, 1, 4)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=16, context_parallel=ranks).build({"prompt": 6})
    planned = {"prompt": PlannedRow(3, 6, [4, 6])}
    assert differences(metadata, planned, 4, shard=Shard(2, 1, 1)) == []
    assert any(
        sentence.startswith("slot_mapping") for sentence in differences(metadata, planned, 4, shard=Shard(2, 0, 1))
    )
    assert differences(metadata, planned, 4, shard=Shard(2, 1, 2))
