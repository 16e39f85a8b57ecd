"""Arenas and the transport copy: copies that run late, watermarks, poison, and where a step's fields lie."""

import contextlib
import copy
import random

import batches
import numpy as np
import pytest
from builder.device.arena_batches import CONFIG, Backend, two_requests
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from attncore.builder import InputBatch, MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.persistent import assembly
from attncore.errors import AttncoreError
from attncore.kernels import codes
from attncore.kernels import numba as numba_kernels

SEEN = ("slot_mapping", "seq_lens", "query_start_loc", "paged_kv_indptr", "positions")


class LateTransport(CopyTransport):
    """A device that does its work as late as it may: when it is waited for, or by chance before."""

    chance = random.Random(0)

    def attach(self, ring):
        super().attach(ring)
        self.queue, self.issued, self.done = [], 0, 0
        self.marks = [0] * ring.depth

    def _issue(self, function, *args):
        self.queue.append((function, args))
        self.issued += 1
        if self.chance.random() < 0.1:
            self.run(self.chance.randint(self.done, self.issued))

    def run(self, until):
        while self.done < until:
            function, args = self.queue.pop(0)
            function(*args)
            self.done += 1

    def _record(self, arena):
        self.marks[arena] = self.issued

    def _wait_for(self, arena):
        self.run(self.marks[arena])


class Faulty(LateTransport):
    def attach(self, ring):
        super().attach(ring)
        apply = self.tables.apply

        def forgiving(index, entries):
            with contextlib.suppress(IndexError):  # a journal of poison names columns that no table has
                apply(index, entries)

        self.tables.apply = forgiving


class NeverWaits(Faulty):
    def _wait_for(self, arena):
        pass


class ReceiptBeforeThePlan(Faulty):
    """The event is recorded where the plan's own copies have not been issued."""

    def wait(self, step):
        super().wait(step)
        self.begun = self.issued

    def _record(self, arena):
        self.marks[arena] = self.begun


def overlapping_run(side_class, monkeypatch, depth, steps=120, seed=0):
    """How many steps the device, and a library's plan, saw otherwise than they were built."""
    LateTransport.chance = random.Random(seed)
    rng = np.random.default_rng(seed)
    sides = []

    def late(transport, device, tables, page_lists):
        sides.append(side_class(device, tables, page_lists))
        return sides[-1]

    monkeypatch.setenv("ATTNCORE_POISON", "1")
    monkeypatch.setattr(assembly, "new_transport", late)
    planned, expected_plans, seen, expected = [], [], [], []

    class Planning(Backend):
        def plan(self, metadata):  # as libraries do: an asynchronous copy from the host views that it was given
            lens = metadata.host.seq_lens
            expected_plans.append(lens.tolist())
            sides[0]._issue(lambda: planned.append(lens.tolist()))

    batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=4)
    made = MetadataBuilder(batch, Planning(CONFIG), max_num_batched_tokens=64, depth=depth, transport="copy")
    side, next_block = sides[0], 1
    captured = [made.capture(size).num_reqs for size in (2, 6)]
    for step in range(steps):
        if len(batch) < 6 and rng.random() < 0.4:
            batch.add_request(step, range(next_block, next_block + 16), int(rng.integers(0, 40)))
            next_block += 16
        for req_id in [r for r in batch.req_ids if batch.num_computed_tokens(r) > 58 or rng.random() < 0.05]:
            batch.remove_request(req_id)
        bucket = next((size for size in captured if size >= len(batch)), None) if rng.random() < 0.5 else None
        metadata = made.build(
            {r: int(rng.integers(1, 4)) for r in batch.req_ids} if bucket is None else {}, bucket=bucket
        )
        fields = {name: getattr(metadata, name) for name in SEEN}
        expected.append({name: getattr(metadata.host, name).tolist() for name in SEEN})
        rows = [batch.block_table[row].tolist() for row in range(metadata.num_actual_reqs)]
        table = metadata.block_table[: len(rows)]

        def kernel(fields=fields, table=table):
            seen.append({name: value.tolist() for name, value in fields.items()} | {"table": table.tolist()})

        held = [len(batch.block_ids(r)) for r in metadata.req_ids]
        expected[-1]["table"] = [row[:count] for row, count in zip(rows, held, strict=True)]
        side._issue(kernel)
    side.run(side.issued)
    for found, want in zip(seen, expected, strict=True):
        found["table"] = [row[: len(w)] for row, w in zip(found["table"], want["table"], strict=True)]
    wrong_plans = sum(a != b for a, b in zip(planned, expected_plans, strict=True))
    return sum(a != b for a, b in zip(seen, expected, strict=True)), wrong_plans


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_copies_that_run_late_carry_their_own_step(monkeypatch, depth):
    for seed in range(3):
        assert overlapping_run(LateTransport, monkeypatch, depth, seed=seed) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_without_a_wait_they_carry_another(monkeypatch, depth):
    wrong, wrong_plans = overlapping_run(NeverWaits, monkeypatch, depth)
    assert wrong > 10
    assert wrong_plans > 10


def test_a_receipt_before_the_plans_copies_is_too_early(monkeypatch):
    _, wrong_plans = overlapping_run(ReceiptBeforeThePlan, monkeypatch, depth=1)
    assert wrong_plans > 10


# ---- watermarks ------------------------------------------------------------------------------------------------------


class Mirrored(batches.Batches):
    """After each step the device's table, which is made of copied bytes alone, is compared with the host's."""

    kernels = "numba"
    transports = ("copy", "copy")


def keeps_synced(method, rows_of=lambda self: [self]):
    """A method of the kernels that forgets to lower watermarks."""

    def forgetful(self, *args):
        kept = [rows.state[codes.SYNCED].copy() for rows in rows_of(self)]
        result = method(self, *args)
        for rows, synced in zip(rows_of(self), kept, strict=True):
            rows.state[codes.SYNCED] = synced
        return result

    return forgetful


def every_group(batch_rows):
    return [*batch_rows.decoders, *([batch_rows.cross] if batch_rows.cross else [])]


@pytest.mark.parametrize(
    ("owner", "name", "rows_of"),
    [
        (numba_kernels.TableState, "truncate", lambda self: [self]),
        (numba_kernels.TableState, "replace", lambda self: [self]),
        (numba_kernels.BatchState, "swap", every_group),
    ],
)
def test_no_watermark_may_be_left_high(monkeypatch, owner, name, rows_of):
    monkeypatch.setattr(owner, name, keeps_synced(getattr(owner, name), rows_of))
    found = settings(
        max_examples=300, stateful_step_count=60, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(Mirrored, settings=found)


# ---- poison, and where fields lie ------------------------------------------------------------------------------------


@pytest.fixture
def batch(kernels):
    return two_requests(kernels)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_poison_makes_late_access_raise(monkeypatch, batch, transport):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    made = MetadataBuilder(batch, max_num_batched_tokens=32, depth=2, transport=transport)
    first, kept = made.build(), []
    assert first.seq_lens.tolist() == [4, 7]
    kept.append(first.host.slot_mapping)
    made.build({"a": 5})
    if transport == "auto":  # a device has one arena: its fields are the next step's once that was sent
        assert first.groups["decoder"].seq_lens.tolist() == [4, 7]
    else:
        assert first.groups["decoder"].host.seq_lens.tolist() == [4, 7]
        with pytest.raises(AttncoreError, match=r"'seq_lens' on the device after step 1 was sent there"):
            _ = first.groups["decoder"].seq_lens
    made.build()
    for ask in (lambda: first.seq_lens, lambda: first.num_reqs, lambda: first.host, lambda: first.groups):
        with pytest.raises(AttncoreError, match=r"step 0 was asked for .* after its arena was taken by step 2"):
            ask()
    assert [made.build().seq_lens.tolist() for _ in range(3)] == [[10, 11], [11, 12], [12, 13]]


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_step_of_another_shape_takes_the_arena_too(monkeypatch, batch, transport):
    """Each shape has StepArenas of its own over the same memory."""
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    made = MetadataBuilder(batch, max_num_batched_tokens=1024, depth=1, transport=transport)
    made.capture(2)
    made.capture(3)
    for older in ({"bucket": 2}, {}):
        for later in ({}, {"bucket": 3}, {"bucket": 2}):
            first = made.build(**older)
            assert "STALE" not in repr(first)
            number, _ = first.step, made.build(**later)
            for ask in (lambda first=first: first.seq_lens, lambda first=first: first.host):
                with pytest.raises(AttncoreError, match=rf"step {number} was asked .* taken by step {number + 1}"):
                    ask()
            assert "STALE" in repr(first)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_refused_build_poisons_no_step(monkeypatch, batch, transport):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    made = MetadataBuilder(batch, max_num_batched_tokens=32, depth=1, transport=transport)
    step = made.build()
    before = {name: getattr(step.host, name).tolist() for name in SEEN}
    for refused in ({"a": 33}, {"nobody": 1}, {"a": 2.5}):
        with pytest.raises((ValueError, TypeError), match=r"^(scheduled|block_table): "):
            made.build(refused)
    assert {name: getattr(step.host, name).tolist() for name in SEEN} == before


def test_no_pinned_memory_is_an_error_that_names_it(monkeypatch, batch):
    torch = pytest.importorskip("torch")

    def exhausted(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(CopyTransport, "attach", lambda self, ring: None)
        side = CopyTransport("cpu", list(batch._core.tables.values()))
        patch.setattr(torch, "zeros", exhausted)
        with pytest.raises(MemoryError, match=r"arenas: no 4096 bytes of pinned host memory .* lower max_num_batched"):
            side.pinned(4096)
    assert MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy").build().seq_lens.tolist() == [4, 7]


def test_steps_of_another_device_are_refused(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    made.build()
    made._assembly.side._cuda, made._assembly.side._current = True, lambda: 1
    with pytest.raises(RuntimeError, match=r"cuda:1 is the current device, but this builder's steps go to cuda:0"):
        made.build({"a": 2})
    made._assembly.side._cuda = False
    assert made.build({"a": 2}).seq_lens.tolist() == [8, 6]


def test_metadata_can_be_copied(batch):
    metadata = MetadataBuilder(batch, max_num_batched_tokens=32).build()
    assert copy.copy(metadata).seq_lens.tolist() == metadata.seq_lens.tolist() == [4, 7]
    assert copy.copy(metadata.host).positions.tolist() == [3, 6]


def test_a_plan_finds_its_builder_and_where_page_indices_will_be(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    step = made.build()
    pages, buffer = step.paged_kv_indices.tolist(), step.page_buffer
    assert step.builder is made
    assert buffer[: len(pages)].tolist() == pages
    assert buffer.numel() >= batch.max_num_reqs * 4
    step = made.build()
    assert step.page_buffer is buffer
    made.close()
    read_in_place = MetadataBuilder(batch, max_num_batched_tokens=32).build()
    assert read_in_place.page_buffer is None
