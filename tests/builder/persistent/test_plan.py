"""The backend's plan runs once per build, before the metadata is returned; a failing plan undoes the step."""

import pytest
from builder.plain_backend import Plain, config

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder import InputBatch, MetadataBuilder


class Planning(Plain):
    def __init__(self, config):
        super().__init__(config)
        self.planned, self.refuses = [], False

    def plan_layers(self, metadata, key):
        if self.refuses:
            raise RuntimeError("the workspace is too small")
        self.planned.append((key.sliding_window, metadata.host.seq_lens.tolist()))


@pytest.fixture
def backend():
    backend = Planning(config())
    for layer, window in enumerate((None, 8, None)):
        backend.impl(f"layers.{layer}", scale=1.0, sliding_window=window)
    return backend


@pytest.fixture
def batch(kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=4, kernels=kernels)
    for name in "abc":
        batch.add_request(name, [1, 2, 3], 2)
    return batch


def test_plan_runs_once_a_step_for_each_distinct_layer(backend, batch):
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=32)
    builder.build({"a": 3})
    assert backend.planned == [(None, [3, 3, 5]), (8, [3, 3, 5])]
    backend.planned.clear()
    builder.build()
    assert [lens for _, lens in backend.planned] == [[4, 4, 6]] * 2


def test_a_failed_plan_undoes_the_step(backend, batch):
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=32)
    builder.build()
    before = batch.req_ids, batch.block_table.tobytes(), [batch.num_computed_tokens(name) for name in "abc"]
    backend.refuses = True
    for scheduled in ({"a": 3}, {}, {"b": 0}, {"a": 0, "b": 2}):
        with pytest.raises(RuntimeError, match="workspace"):
            builder.build(scheduled)
        assert before == (
            batch.req_ids, batch.block_table.tobytes(), [batch.num_computed_tokens(name) for name in "abc"]
        )  # fmt: skip
    backend.refuses = False
    metadata = builder.build({"a": 3})
    assert metadata.moves == ((0, 2),)
    assert metadata.req_ids == ("c", "b", "a")
    assert metadata.step == 1  # a step that did not happen has no number
    assert metadata.seq_lens.tolist() == [4, 4, 6]


def test_rows_removed_before_a_failed_plan_stay_removed(backend, batch):
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=32)
    builder.build()
    batch.remove_request("a")
    backend.refuses = True
    with pytest.raises(RuntimeError, match="workspace"):
        builder.build()
    assert batch.req_ids == ("b", "c")
    assert batch.add_request("d", [9], 1) == 0  # the hole is where it was
    backend.refuses = False
    assert builder.build().req_ids == ("d", "b", "c")


def test_a_backend_without_a_plan_costs_a_step_nothing(batch):
    assert MetadataBuilder(batch, Plain(config()), max_num_batched_tokens=32)._backends.plans == ()


def test_the_list_builder_plans_too(backend, kernels):
    builder = CommonMetadataBuilder(4, backend=backend, kernels=kernels)
    builder.build([SequenceGroup(False, [Sequence(0, 1, 4, [3, 4])])])
    assert backend.planned == [(None, [5]), (8, [5])]


def test_a_backend_of_another_block_size_is_refused(backend, kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=8, kernels=kernels)
    with pytest.raises(ValueError, match="batch: its block_size 8 is not the backend's 4"):
        MetadataBuilder(batch, backend, max_num_batched_tokens=32)
