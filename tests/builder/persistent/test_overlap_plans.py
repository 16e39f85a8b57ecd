"""Overlapped steps with a backend that plans by exact lengths: only where its plan is made by the graph."""

import pytest
import torch
from builder.plain_backend import BLOCK, Plain, config

from attncore import BackendSpec
from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import capturing, launch, new_graph

SPEC = BackendSpec(
    name="plain", api=1, factory="nowhere:Plain", devices={"cpu": 1}, dtypes={"float32"}, head_sizes={8},
    block_sizes={BLOCK}, features={"multi_token_decode"}, cuda_graph="uniform", host_needs={"seq_lens"},
    device_needs={"seq_lens"}, host_lengths="exact", plan_staging="per_slot",
)  # fmt: skip


class PlansByLengths(Plain):
    def __init__(self):
        super().__init__(config(SPEC))
        self.planned = []

    def plan(self, metadata):
        self.planned.append(metadata.host.seq_lens.tolist())


class RecordsPlans(PlansByLengths):
    records = True

    def record_plan(self, metadata):
        return self.records


def builder_over(backend):
    """A builder that has captured two rows of three tokens and run one such step, whose drafts are all in doubt."""
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=BLOCK)
    batch.add_request("a", [1, 2, 3], 4)
    rejected = torch.full((2,), 2, dtype=torch.int32)
    options = {"max_num_batched_tokens": 16, "decode_threshold": 3, "num_rejected": rejected, "transport": "copy"}
    builder = MetadataBuilder(batch, backend, **options)
    metadata = builder.capture(2, 3)
    with capturing(new_graph("cpu")) as graph:
        launch(metadata.record)
    builder.build(query_len=3, bucket=2).replay(graph)
    return batch, builder, graph


def refused(batch, builder, **options):
    step = builder.last_step
    with pytest.raises(ValueError, match="overlapped: backend 'plain' needs exact lengths for a plan on the host"):
        builder.build(query_len=3, overlapped=True, **options)
    assert (builder.last_step, batch.num_computed_tokens("a")) == (step, 7)


def test_a_size_that_plans_itself_overlaps_and_no_other_step_does():
    backend = RecordsPlans()
    batch, builder, graph = builder_over(backend)
    planned = len(backend.planned)
    refused(batch, builder)
    metadata = builder.build(query_len=3, bucket=2, overlapped=True)
    metadata.replay(graph)
    assert (builder.host_lengths(metadata), metadata.seq_lens.tolist()) == ("bounded", [8, 0])
    assert len(backend.planned) == planned, "planned by bounds"
    batch.rollback_many({"a": 2})
    batch.rollback_many({"a": 2})
    builder.build(query_len=3)
    assert backend.planned[planned:] == [[9]]


def test_a_size_whose_plan_the_host_makes_does_not_overlap(monkeypatch):
    monkeypatch.setattr(RecordsPlans, "records", False)
    batch, builder, _ = builder_over(RecordsPlans())
    refused(batch, builder)
    refused(batch, builder, bucket=2)


def test_a_backend_that_records_no_plan_is_refused_at_once():
    with pytest.raises(ValueError, match="num_rejected: backend 'plain' needs exact lengths on the host; choose one"):
        builder_over(PlansByLengths())
