"""Rules of the random sequences of batches.py in which requests come, go and change."""

import oracles
import pytest
from batches_model import MAX_LEN, MAX_REQS, Model, Request
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule


class RequestRules(Model):
    @rule(data=st.data(), computed=st.integers(0, MAX_LEN - 8), lookahead=st.integers(0, 2), encoder=st.integers(0, 20))
    def join(self, data, computed, lookahead, encoder):
        self.add(data, computed, lookahead, encoder)

    def add(self, data, computed, lookahead, encoder):
        has_cross = self.groups[-1].cross
        encoder, encoded = (encoder, data.draw(st.booleans())) if has_cross else (0, False)
        blocks = {}
        for group in self.groups:
            tokens = encoder if group.cross else computed + 1
            count = min(oracles.cdiv(tokens, group.block_size) + lookahead, self.width(group))
            blocks[group.name] = self.fresh(count if tokens else 0)
        options = {"encoder_seq_len": encoder, "encoder_computed": encoded} if has_cross else {}
        if len(self.requests) == MAX_REQS:
            before = self.frozen()
            with pytest.raises(ValueError, match="max_num_reqs 6"):
                self.batch.add_request("one too many", self.as_given(blocks), computed, **options)
            assert self.frozen() == before
            return
        name = f"r{self.next_id:04}"
        self.next_id += 1
        if data.draw(st.booleans()):  # one group too short: nothing of the others stays
            short = {**blocks, self.groups[-1].name: []}
            if (encoder if has_cross else computed) > 0:
                before = self.frozen()
                with pytest.raises(ValueError, match="but holds 0 blocks"):
                    self.batch.add_request(name, self.as_given(short), computed, **options)
                assert self.frozen()[0:2] == before[0:2]
        row = self.batch.add_request(name, self.as_given(blocks), computed, **options)
        assert self.rows[row] is None
        self.rows[row] = name
        self.requests[name] = Request(blocks, computed, encoder, encoded)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data):
        name = self.some(data)
        assert self.batch.remove_request(name) == self.as_given(self.requests.pop(name).blocks)
        self.rows[self.rows.index(name)] = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        request = self.requests[name := self.some(data)]
        assert self.batch.preempt(name) == self.as_given(request.blocks)
        request.blocks, request.computed, request.paused = {group.name: [] for group in self.groups}, 0, True
        request.encoded = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def append(self, data, count):
        names = sorted(data.draw(st.sets(st.sampled_from(sorted(self.requests)), min_size=1)))
        some = data.draw(st.lists(st.sampled_from(self.groups), min_size=1, unique=True))
        more = {name: {group.name: self.fresh(count) for group in some} for name in names}
        given = {name: self.as_given(blocks) for name, blocks in more.items()}
        held = [(self.requests[name].blocks[group.name], self.width(group)) for name in names for group in some]
        if any(len(blocks) + count > width for blocks, width in held):
            before = self.batch_bytes()
            with pytest.raises(ValueError, match="block_ids: request"):
                self.batch.append_blocks_many(given)
            assert self.batch_bytes() == before
            return
        self.batch.append_blocks_many(given)
        for name in names:
            for group in some:
                self.requests[name].blocks[group.name] += more[name][group.name]
            if any(self.requests[name].blocks[group.name] for group in self.groups if not group.cross):
                self.requests[name].paused = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def replace(self, data):
        """Copy on write: the block that a request is writing gets another id."""
        request = self.requests[name := self.some(data)]
        group = data.draw(st.sampled_from(self.groups))
        blocks = request.blocks[group.name]
        if not blocks:
            return
        index = data.draw(st.integers(0, len(blocks) - 1))
        if blocks[index] == 0:
            return
        (block,) = self.fresh(1)
        assert self.batch.replace_block(name, index, block, group.name) == blocks[index]
        self.replaced(group, blocks[index], block)
        blocks[index] = block

    def replaced(self, group, old, new):
        """What an engine does with a block that was written on, in ``group``."""

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 60))
    def roll_back(self, data, count):
        """Rejected drafts: all of a call, or none."""
        names = sorted(data.draw(st.sets(st.sampled_from(sorted(self.requests)), min_size=1)))
        counts = {name: min(count, self.requests[name].computed) for name in names[:-1]} | {names[-1]: count}
        problem = "past the start" if count > self.requests[names[-1]].computed else None
        for name in names:
            request, left = self.requests[name], self.requests[name].computed - counts[name]
            for group in self.groups:
                if group.sliding_window is not None and counts[name] > 0:
                    first = max(0, left + 1 - group.sliding_window)
                    index = first // group.block_size
                    if 0 in request.blocks[group.name][index:]:
                        problem = "past the start|which its window has passed"
        if problem:
            before = self.frozen()
            with pytest.raises(ValueError, match=problem):
                self.batch.rollback_many(counts)
            assert self.frozen() == before
            return
        self.batch.rollback_many(counts)
        for name in names:
            self.requests[name].computed -= counts[name]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.requests[name := self.some(data)]
        group = data.draw(st.sampled_from(self.groups))
        blocks = request.blocks[group.name]
        needed = oracles.cdiv(request.encoder if group.cross else request.computed, group.block_size)
        if len(blocks) < needed:  # preempted, and not given its encoder's blocks again
            return
        keep = data.draw(st.integers(needed, len(blocks)))
        assert self.batch.truncate_blocks(name, keep, group.name) == blocks[keep:]
        del blocks[keep:]

    @precondition(lambda self: any(group.sliding_window for group in self.groups))
    @rule(rollback=st.integers(0, 3))
    def pass_windows(self, rollback):
        expected = {}
        for name, request in self.requests.items():
            for group in self.groups:
                if group.sliding_window is None:
                    continue
                blocks = request.blocks[group.name]
                first = max(0, max(request.computed - rollback, 0) + 1 - group.sliding_window)
                passed = [i for i in range(min(first // group.block_size, len(blocks))) if blocks[i]]
                if passed:
                    expected.setdefault(name, {})[group.name] = [blocks[i] for i in passed]
                    for i in passed:
                        blocks[i] = 0
        released = self.batch.release_passed_blocks(rollback)
        assert released == {name: self.as_given(blocks) for name, blocks in expected.items()}

    @precondition(lambda self: self.batch.num_rows)
    @rule(data=st.data())
    def swap(self, data):
        i, j = (data.draw(st.integers(0, self.batch.num_rows - 1)) for _ in range(2))
        self.batch.swap_rows(i, j)
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
