"""metadata.abandon takes back the whole step that waits for its replay, while its requests are as they were."""

import pytest
from core_state import core_state
from interrupted_calls import AtOpcode

from attncore.builder import ContextParallel, InputBatch, MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport
from attncore.errors import CaptureError


class Abandonable(CopyTransport):
    """A step in ``pending`` waits for its replay, as with nodes of graphs."""

    def send(self, step, shape, out, num_rows, waits):
        super().send(step, shape, out, num_rows, waits)
        self.pending = step if waits else -1

    def take_back(self, step):
        super().take_back(step)
        self.pending = -1


def waiting_step(monkeypatch, kernels=None):
    monkeypatch.setattr("attncore.builder.device.by_copy.CopyTransport", Abandonable)
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    for row, name in enumerate("abc"):
        batch.add_request(name, [2 * row + 1, 2 * row + 2], row)
    builder.capture(2)
    return batch, builder, builder.build({"a": 0}, bucket=2)


def test_tokens_and_rows_are_taken_back(monkeypatch, kernels):
    batch, builder, metadata = waiting_step(monkeypatch, kernels)
    assert metadata.moves == ((0, 2),)
    metadata.abandon()
    assert (batch.req_ids, [batch.num_computed_tokens(name) for name in "abc"]) == (("a", "b", "c"), [0, 1, 2])
    assert builder.build().context_lens.tolist() == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_of_all_ranks_are_taken_back(monkeypatch, kernels, rank):
    """A rank's ``context_lens`` count the tokens that it keeps, and the batch those of all ranks."""
    monkeypatch.setattr("attncore.builder.device.by_copy.CopyTransport", Abandonable)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=8, kernels=kernels)
    share = ContextParallel(2, rank, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy", context_parallel=share)
    batch.add_request("a", [1, 2], 9)
    batch.add_request("b", [3, 4], 3)
    builder.capture(2)
    metadata = builder.build(bucket=2)
    metadata.abandon()
    assert [batch.num_computed_tokens(name) for name in "ab"] == [9, 3]
    metadata = builder.build(bucket=2)
    batch.rollback("a", 10 - (metadata.host.context_lens[0] + 1))  # as many as the rank keeps, and the step's
    with pytest.raises(CaptureError, match=r"^abandon: request 'a' has changed"):
        metadata.abandon()


def test_nothing_is_taken_from_a_later_request_of_the_same_name(monkeypatch, kernels):
    batch, _, metadata = waiting_step(monkeypatch, kernels)
    batch.remove_request("b")
    batch.add_request("b", [7], 2)
    with pytest.raises(CaptureError, match=r"^abandon: request 'b' has changed since step 1 was built"):
        metadata.abandon()
    assert [batch.num_computed_tokens(name) for name in "abc"] == [0, 2, 3]


def test_a_request_that_came_before_a_step_was_abandoned_is_in_later_steps(monkeypatch, kernels):
    """Rows that are moved back bring the number of changes before back: the request came no later than that."""
    batch, builder, metadata = waiting_step(monkeypatch, kernels)
    column = batch.column("seed", "int64")
    assert metadata.moves
    batch.add_request("d", [7])
    metadata.abandon()
    step = builder.build()
    assert (step.req_ids, step.moves) == (("a", "b", "c", "d"), ())
    batch.remove_request("a")
    column.write(step, [10, 11, 12, 13])
    assert [column[name] for name in batch.req_ids] == [11, 12, 13]


def test_an_interrupted_abandon_is_finished_by_the_next_call(monkeypatch):
    for count in range(0, 2000, 3):
        batch, builder, metadata = waiting_step(monkeypatch)
        assert metadata.moves
        with AtOpcode(count) as interrupt:
            metadata.abandon()
        assert builder.last_step in ((0, 1) if interrupt.fired else (0,))
        if builder.last_step == 1:
            metadata.abandon()
        assert (batch.req_ids, [batch.num_computed_tokens(name) for name in "abc"]) == (("a", "b", "c"), [0, 1, 2])
        assert batch.block_table.tolist()[:3] == [[1, 2, *[0] * 6], [3, 4, *[0] * 6], [5, 6, *[0] * 6]]
        if not interrupt.fired:
            return
    pytest.fail("no call came to its end")


@pytest.mark.parametrize(("transport", "name"), [("auto", "none"), ("copy", "copy")])
def test_where_no_step_waits_its_tokens_are_rolled_back(kernels, transport, name):
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport=transport)
    batch.add_request("a", [1, 2], 3)
    builder.capture(2)
    metadata, graph = builder.build(bucket=2), Counting()
    with pytest.raises(CaptureError, match=rf"^abandon: step 1 .* with transport '{name}' no step does, so take its"):
        metadata.abandon()
    metadata.replay(graph)
    metadata.replay(graph)
    assert graph.replayed == 2
    batch.rollback_many({"a": 1})
    assert builder.build(bucket=2).positions[0] == 3


class Counting:
    replayed = 0

    def replay(self):
        self.replayed += 1


def test_rows_that_were_swapped_are_swapped_back_first(monkeypatch):
    batch, builder, metadata = waiting_step(monkeypatch)
    batch.swap_rows(0, 1)
    with pytest.raises(CaptureError, match=r"; rows that were swapped are to be swapped back first$"):
        metadata.abandon()
    batch.swap_rows(0, 1)
    metadata.abandon()
    assert builder.last_step == 0
    assert (batch.req_ids, [batch.num_computed_tokens(name) for name in "abc"]) == (("a", "b", "c"), [0, 1, 2])


@pytest.mark.parametrize(
    "change", [lambda batch: batch.rollback("b", 1), lambda batch: batch.remove_request("c"),
               lambda batch: (batch.remove_request("b"), batch.add_request("b", [9], 2))],
)  # fmt: skip
def test_a_step_whose_requests_have_changed_is_not_abandoned(monkeypatch, change):
    batch, builder, metadata = waiting_step(monkeypatch)
    change(batch)
    before = core_state(batch)
    with pytest.raises(CaptureError, match=r"^abandon: request '.' has changed since step 1 was built"):
        metadata.abandon()
    assert core_state(batch) == before
    assert builder.last_step == 1
