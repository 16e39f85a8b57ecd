"""Rules of the random sequences of batches.py that build a step: eager, captured, empty, and those that fail."""

import pytest
from batches_checks import StepChecks, address_of
from batches_model import MAX_LEN, MAX_REQS, MAX_TOKENS
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from attncore.errors import CaptureError


class StepRules(StepChecks):
    @precondition(lambda self: self.requests)
    @rule(data=st.data(), all_run=st.booleans())
    def build(self, data, all_run):
        """A step that fits: one token each, or chunks and drafts for some; those without room do not run."""
        scheduled, left = {}, MAX_TOKENS - MAX_REQS
        for name, request in sorted(self.requests.items()):
            if request.paused:
                continue
            if self.room(request) < 1 or not self.ready(request):
                scheduled[name] = 0
            elif not all_run and data.draw(st.booleans()):
                most = min(self.room(request), left)
                scheduled[name] = data.draw(st.integers(0, most)) if most > 0 else 0
                left -= scheduled[name]
        self.step(self.without_null(scheduled))

    def capture(self, size, query_len):
        self.captured[size] = query_len
        metadata = self.builder.capture(size, query_len)
        assert (metadata.max_seq_len, metadata.req_ids) == (MAX_LEN, ())
        self.captured_now(size, metadata)
        self.addresses[size] = {name: address_of(array) for name, array in metadata._device.items() if len(array)}

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), query_len=st.integers(1, 3))
    def build_in_a_captured_size(self, data, query_len):
        """Decodes of one length, padded; captured first where it was not. What does not fit is refused."""
        query_len = min(query_len, self.threshold)
        size = data.draw(st.integers(1, MAX_REQS) if not self.captured or data.draw(st.integers(0, 4)) == 0
                         else st.sampled_from(sorted(self.captured)))  # fmt: skip
        if size not in self.captured:
            if data.draw(st.booleans()):
                before = self.frozen()
                with pytest.raises(CaptureError, match=f"bucket: {size} was not captured"):
                    self.builder.build(bucket=size)
                assert self.frozen() == before
                return
            self.capture(size, query_len)
        each = self.captured[size]
        able = [
            name for name, request in sorted(self.requests.items())
            if self.ready(request) and self.room(request) >= each and (request.encoded or not request.encoder)
        ]  # fmt: skip
        running = able[:size] if data.draw(st.booleans()) else able
        scheduled = self.without_null(dict.fromkeys(self.requests, 0) | dict.fromkeys(running, each))
        if sum(count > 0 for count in scheduled.values()) > size:
            before = self.frozen()
            with pytest.raises(ValueError, match=f"bucket: {size} rows? captured, but this step has"):
                self.builder.build(scheduled, bucket=size)
            assert self.frozen() == before
            return
        self.step(scheduled, bucket=size)

    @precondition(lambda self: self.requests and not self.ranks)
    @rule(data=st.data(), num_reqs=st.integers(1, MAX_REQS), num_tokens=st.integers(1, MAX_TOKENS))
    def build_in_a_size_of_tokens(self, data, num_reqs, num_tokens):
        """Rows of any lengths, prompts among them, padded; captured first where it was not."""
        size = num_reqs, num_tokens
        if self.of_tokens and data.draw(st.booleans()):
            size = data.draw(st.sampled_from(self.of_tokens))
        elif size not in self.of_tokens:
            metadata = self.builder.capture(num_reqs, num_tokens=num_tokens)
            assert (metadata.max_query_len, metadata.max_seq_len, metadata.num_prefills) == (num_tokens, MAX_LEN, 0)
            self.of_tokens.append(size)
            self.captured_now(size, metadata)
            self.addresses[size] = {name: address_of(array) for name, array in metadata._device.items() if len(array)}
        scheduled, left = dict.fromkeys(self.requests, 0), size[1]
        for name, request in sorted(self.requests.items()):
            if self.ready(request) and (request.encoded or not request.encoder):
                most = min(self.room(request), left)
                scheduled[name] = data.draw(st.integers(0, most)) if most > 0 else 0
                left -= scheduled[name]
        scheduled = self.without_null(scheduled)
        if sum(count > 0 for count in scheduled.values()) > size[0]:
            before = self.frozen()
            with pytest.raises(ValueError, match=r"bucket: \d+ rows? captured, but this step has"):
                self.builder.build(scheduled, bucket=size)
            assert self.frozen() == before
            return
        self.step(scheduled, bucket=size)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 5))
    def decode(self, data, count):
        """Several steps of all requests, with blocks as they are needed: the most frequent case of an engine."""
        for _ in range(count):
            for name, request in self.requests.items():
                if self.room(request) < 1 and not request.paused and request.computed < MAX_LEN:
                    more = {g.name: self.fresh(1) for g in self.groups
                            if not g.cross and len(request.blocks[g.name]) < self.width(g)}  # fmt: skip
                    if self.one_group or more:
                        self.batch.append_blocks(name, self.as_given(more))
                    for group, blocks in more.items():
                        request.blocks[group] += blocks
            able = {n for n, r in self.requests.items() if self.ready(r) and self.room(r) > 0}
            self.step(self.without_null({name: 0 for name in self.requests if name not in able}))

    @precondition(lambda self: self.captured)
    @rule(data=st.data())
    def build_empty(self, data):
        size = self.some(data, self.captured)
        before = self.batch_bytes()
        metadata = self.builder.build_empty(size)
        assert self.batch_bytes() == before
        self.run(size, metadata)
        self.check(metadata, [], size)

    @precondition(lambda self: any(not r.paused for r in self.requests.values()))
    @rule(data=st.data(), extra=st.integers(1, 30))
    def build_without_room(self, data, extra):
        """A step whose token has no block, or exceeds the length: refused, and nothing changed."""
        name = self.some(data, [n for n, r in self.requests.items() if not r.paused])
        request = self.requests[name]
        before = self.frozen()
        scheduled = dict.fromkeys(self.requests, 0) | {name: max(self.room(request), 0) + extra}
        with pytest.raises(ValueError, match=r"(holds \d+ blocks? but needs|exceed max_model_len|the null block)"):
            self.builder.build(scheduled)
        assert self.frozen() == before

    def plan(self, metadata):
        if self.plan_fails:
            _ = metadata.paged_kv_indices, metadata.decode_metadata, metadata.prefill_metadata
            raise RuntimeError("no plan")

    @precondition(lambda self: self.planned)
    @rule(data=st.data())
    def build_with_a_failing_plan(self, data):
        """The build changes nothing: order of rows, tables and lengths are as before."""
        scheduled = {}
        for name, request in sorted(self.requests.items()):
            if not request.paused:
                most = min(self.room(request), 8) if self.ready(request) else 0
                scheduled[name] = data.draw(st.integers(0, max(most, 0)))
        scheduled = self.without_null(scheduled)
        before = self.batch_bytes()
        self.plan_fails = True
        with pytest.raises(RuntimeError, match="no plan"):
            self.builder.build(scheduled)
        self.plan_fails = False
        assert self.batch_bytes() == before

    @precondition(lambda self: self.planned)
    @rule(data=st.data(), size=st.integers(1, MAX_REQS), known=st.booleans())
    def fail_to_plan_a_captured_size(self, data, size, known):
        """A padded step, an empty step or the capture itself: the batch and the captured sizes do not change."""
        if known and self.captured:
            size = data.draw(st.sampled_from(sorted(self.captured)))
        captured, each = self.builder.captured, self.captured.get(size, 1)
        able = [n for n, r in sorted(self.requests.items())
                if self.ready(r) and self.room(r) >= each and (r.encoded or not r.encoder)]  # fmt: skip
        scheduled = self.without_null(dict.fromkeys(self.requests, 0) | dict.fromkeys(able[:size], each))
        before, calls = self.batch_bytes(), [lambda: self.builder.capture(size, each)]
        if size in self.captured:
            calls += [lambda: self.builder.build_empty(size), lambda: self.builder.build(scheduled, bucket=size)]
        self.plan_fails = True
        with pytest.raises(RuntimeError, match="no plan"):
            data.draw(st.sampled_from(calls))()
        self.plan_fails = False
        assert (self.batch_bytes(), self.builder.captured) == (before, captured)
