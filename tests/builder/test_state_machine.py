"""Random lives of a batch: after every build, every field is compared with the plain-Python oracle.

The model knows its requests by id and an engine's own per-row list, which follows ``add_request`` and
``metadata.moves`` only. A refused call must leave every byte as it was.
"""

import numpy as np
import oracles
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attncore.builder import InputBatch, MetadataBuilder, builder

MAX_REQS, MAX_LEN, MAX_TOKENS = 6, 46, 64


class Request:
    def __init__(self, blocks, computed):
        self.blocks, self.computed, self.paused = blocks, computed, False


class Batches(RuleBasedStateMachine):
    kernels = "cython"

    @initialize(block_size=st.sampled_from([1, 3, 4, 16]), depth=st.integers(1, 3), planned=st.booleans())
    def start(self, block_size, depth, planned):
        self.block_size = block_size
        self.batch = InputBatch(
            max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, block_size=block_size, kernels=self.kernels
        )
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=MAX_TOKENS, depth=depth)
        self.plan_fails = False
        if planned:  # as the builder does for a backend with a plan
            self.builder._plan, self.builder._decode_step = self.plan, builder._not_this_way
        self.requests = {}
        self.rows = [None] * MAX_REQS  # what an engine keeps beside the batch
        self.next_id = 0
        self.next_block = 1

    def fresh(self, count):
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return blocks

    def some(self, data, ids=None):
        return data.draw(st.sampled_from(sorted(self.requests if ids is None else ids)))

    def frozen(self):
        return (
            self.batch._state.tobytes(), self.batch.block_table.tobytes(), tuple(self.batch._ids),
            sorted(self.batch._holes), sorted(self.batch._paused), dict(self.batch._row_of),
            [{k: v.tobytes() for k, v in arena.host._fields.items()} for arena in self.builder._metadata],
        )  # fmt: skip

    @property
    def width(self):
        return oracles.cdiv(MAX_LEN, self.block_size)

    @rule(data=st.data(), computed=st.integers(0, MAX_LEN - 8), lookahead=st.integers(0, 2))
    def add(self, data, computed, lookahead):
        blocks = self.fresh(min(oracles.cdiv(computed + 1, self.block_size) + lookahead, self.width))
        if len(self.requests) == MAX_REQS:
            before = self.frozen()
            with pytest.raises(ValueError, match="max_num_reqs 6"):
                self.batch.add_request("one too many", blocks, computed)
            assert self.frozen() == before
            return
        name = f"r{self.next_id:04}"
        self.next_id += 1
        row = self.batch.add_request(name, blocks, computed)
        assert self.rows[row] is None
        self.rows[row] = name
        self.requests[name] = Request(blocks, computed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data):
        name = self.some(data)
        assert self.batch.remove_request(name) == self.requests.pop(name).blocks
        self.rows[self.rows.index(name)] = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        request = self.requests[name := self.some(data)]
        assert self.batch.preempt(name) == request.blocks
        request.blocks, request.computed, request.paused = [], 0, True

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def append(self, data, count):
        names = data.draw(st.sets(st.sampled_from(sorted(self.requests)), min_size=1))
        more = {name: self.fresh(count) for name in sorted(names)}
        if any(len(self.requests[name].blocks) + count > self.width for name in names):
            before = self.frozen()
            with pytest.raises(ValueError, match="block_ids: request"):
                self.batch.append_blocks_many(more)
            assert self.frozen() == before
            return
        self.batch.append_blocks_many(more)
        for name, blocks in more.items():
            self.requests[name].blocks += blocks
            self.requests[name].paused &= not blocks

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 60))
    def roll_back(self, data, count):
        request = self.requests[name := self.some(data)]
        if count > request.computed:
            before = self.frozen()
            with pytest.raises(ValueError, match="past the start"):
                self.batch.rollback(name, count)
            assert self.frozen() == before
            return
        self.batch.rollback(name, count)
        request.computed -= count

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.requests[name := self.some(data)]
        needed = oracles.cdiv(request.computed, self.block_size)
        keep = data.draw(st.integers(needed, max(needed, len(request.blocks))))
        assert self.batch.truncate_blocks(name, keep) == request.blocks[keep:]
        del request.blocks[keep:]

    def room(self, request):
        return min(len(request.blocks) * self.block_size, MAX_LEN) - request.computed

    @rule(data=st.data(), everybody=st.booleans())
    def build(self, data, everybody):
        """A step that fits: one token each, or chunks and drafts for some; those without room sit out."""
        scheduled, left = {}, MAX_TOKENS - MAX_REQS
        for name, request in sorted(self.requests.items()):
            if request.paused:
                continue
            if self.room(request) < 1:
                scheduled[name] = 0
            elif not everybody and data.draw(st.booleans()):
                most = min(self.room(request), left)
                scheduled[name] = data.draw(st.integers(0, most)) if most > 0 else 0
                left -= scheduled[name]
        self.step(scheduled)

    @precondition(lambda self: any(not r.paused for r in self.requests.values()))
    @rule(data=st.data(), extra=st.integers(1, 30))
    def build_without_room(self, data, extra):
        """A step whose token has no block, or exceeds the length: refused, and nothing changed."""
        name = self.some(data, [n for n, r in self.requests.items() if not r.paused])
        request = self.requests[name]
        before = self.frozen()
        scheduled = dict.fromkeys(self.requests, 0) | {name: max(self.room(request), 0) + extra}
        with pytest.raises(ValueError, match=r"(holds \d+ blocks but token|exceed max_model_len)"):
            self.builder.build(scheduled)
        assert self.frozen() == before

    def plan(self, metadata):
        if self.plan_fails:
            raise RuntimeError("no plan")

    @precondition(lambda self: self.builder._plan)
    @rule(data=st.data())
    def build_with_a_failing_plan(self, data):
        """The step does not happen: order of rows, tables, lengths are those of before."""
        scheduled = {}
        for name, request in sorted(self.requests.items()):
            if not request.paused:
                scheduled[name] = data.draw(st.integers(0, max(min(self.room(request), 8), 0)))
        before = self.batch_bytes()
        self.plan_fails = True
        with pytest.raises(RuntimeError, match="no plan"):
            self.builder.build(scheduled)
        self.plan_fails = False
        assert self.batch_bytes() == before

    def batch_bytes(self):
        """What a caller can tell of the batch: the cached block of a row is not among it."""
        return (
            self.batch._state[:2].tobytes(), self.batch.block_table.tobytes(), tuple(self.batch._ids),
            sorted(self.batch._holes), sorted(self.batch._paused), dict(self.batch._row_of), self.batch.num_rows,
        )  # fmt: skip

    def step(self, scheduled):
        queries = {n: scheduled.get(n, 0 if r.paused else 1) for n, r in self.requests.items()}
        metadata = self.builder.build(scheduled)
        for i, j in metadata.moves:
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        running = {name for name, query_len in queries.items() if query_len}
        assert set(metadata.req_ids) == running
        assert self.rows[: len(running)] == list(metadata.req_ids)
        rows = [(self.requests[n].blocks, self.requests[n].computed, queries[n]) for n in metadata.req_ids]
        assert [q == 1 for _, _, q in rows] == sorted((q == 1 for _, _, q in rows), reverse=True)
        for name, expected in oracles.persistent_step(rows, self.block_size).items():
            value = getattr(metadata, name)
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
        for row, (blocks, _, _) in enumerate(rows):
            assert metadata.block_table[row].tolist() == blocks + [0] * (self.width - len(blocks))
        self.check_views(metadata, rows)
        for name in running:
            self.requests[name].computed += queries[name]

    def check_views(self, metadata, rows):
        decodes = [row for row in rows if row[2] == 1]
        prefills = rows[len(decodes) :]
        for part, view in ((decodes, metadata.decode_metadata), (prefills, metadata.prefill_metadata)):
            if not part:
                assert view is None
                continue
            for name, expected in oracles.persistent_step(part, self.block_size).items():
                value = getattr(view, name)
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name

    @invariant()
    def agrees(self):
        if not hasattr(self, "batch"):
            return
        assert self.batch.num_reqs == len(self.requests)
        needy = set()
        for name, request in self.requests.items():
            assert self.batch.block_ids(name) == request.blocks
            assert self.batch.num_computed_tokens(name) == request.computed
            column = request.computed // self.block_size
            if not request.paused and len(request.blocks) <= column < self.width:
                needy.add(name)
        assert set(self.batch.needs_block()) == needy
        held = {row for row, name in enumerate(self.rows) if name is not None}
        for row in set(range(MAX_REQS)) - held:
            assert not self.batch.block_table[row].any()


class NumbaBatches(Batches):
    kernels = "numba"


runs = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestBatches = Batches.TestCase
TestBatches.settings = runs
TestNumbaBatches = NumbaBatches.TestCase
TestNumbaBatches.settings = settings(runs, max_examples=25)
