"""Run with TRITON_INTERPRET=1: the kernels that correct overlapped steps write what torch does, for padded rows too."""

import dataclasses

import numpy as np
import torch
from builder.device.arena_batches import CONFIG, Backend

from attncore import ATTNCORE_API, BackendSpec, MultipleOf
from attncore.builder import InputBatch, MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport

compared = []


def by_both(side, capacity, num_rows, num_tokens):
    """In place of ``_correct``: by the kernels, then by torch from the same arena."""
    arena = side._arena
    before = arena.clone()
    side.corrections.launch(arena, capacity)
    found = {name: field.tolist() for name, field in fields_of(side, capacity, num_rows)}
    arena.copy_(before)
    in_torch(side, capacity, num_rows, num_tokens)
    assert found == {name: field.tolist() for name, field in fields_of(side, capacity, num_rows)}
    compared.append(num_rows)


def fields_of(side, capacity, num_rows):
    views = side.views(capacity)
    for name in ("context_lens", "seq_lens", "seq_start_loc", "positions"):
        yield name, views.fields[name]
    for name, field in views.groups[0].items():
        yield name, field[: num_rows + (name == "paged_kv_indptr")]


in_torch, CopyTransport._correct = CopyTransport._correct, by_both
draw = np.random.default_rng(0)
for pad_seq_len in (0, 1):
    spec = BackendSpec(
        name="late", api=ATTNCORE_API, factory="nowhere:Backend", devices={"cpu": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), device_needs={"block_table", "seq_lens", "paged_kv_indptr"},
        cuda_graph="always", pad_seq_len=pad_seq_len,
    )  # fmt: skip
    batch = InputBatch(max_num_reqs=6, max_model_len=96, block_size=4)
    rejected = torch.zeros(6, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, Backend(dataclasses.replace(CONFIG, spec=spec)), max_num_batched_tokens=32, decode_threshold=3,
        transport="copy", num_rejected=rejected,
    )  # fmt: skip
    builder.capture(6, 3)
    for name in range(4):
        batch.add_request(name, range(1 + 24 * name, 25 + 24 * name), int(draw.integers(0, 20)))
    for _ in range(10):
        builder.build(query_len=3, bucket=6)
        verdicts = draw.integers(0, 3, 4)
        rejected[:4] = torch.from_numpy(verdicts)
        after = builder.build(query_len=3, bucket=6, overlapped=True)
        assert after.paged_kv_indptr[4:].tolist() == [int(after.paged_kv_indptr[4])] * 3
        assert after.paged_kv_last_page_len[4:].tolist() == [0, 0]
        assert after.seq_lens[4:].tolist() == [pad_seq_len] * 2
        batch.rollback_many({name: int(count) + 3 for name, count in enumerate(verdicts)})
        rejected.zero_()
assert len(compared) > 20
print("equal")
