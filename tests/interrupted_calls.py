"""Calls on a batch and its builder that are interrupted, and a model that says what the batch may hold afterwards.

An interrupted call has happened fully or not at all. ``Engine.call`` makes a call of which the model knows both
outcomes; ``AtOpcode`` interrupts it before one opcode of attncore's Python code, ``ByAlarm`` by a signal's handler.
"""

import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from batches_checks import StepChecks
from batches_model import MAX_ENCODER, MAX_LEN, MAX_REQS, MAX_TOKENS, Request

import attncore
from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder

PACKAGE = str(Path(attncore.__file__).parent)

GROUPS = {
    "one group": [KVCacheGroup("decoder", 4)],
    "windows": [KVCacheGroup("full", 4), KVCacheGroup("window", 8, kernel_block_size=4, sliding_window=6)],
    "cross": [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 4, cross=True)],
}


class Interrupt(BaseException):
    """What the handler of a signal raises; no library knows it."""


def interrupt():
    raise Interrupt


class AtTracedOpcode:
    """Makes a ``call`` before opcode number ``count`` of attncore, which raises Interrupt where it is not another;
    ``fired`` says whether there were so many.

    From Python 3.12 on the opcodes of a call may not be traced where they never were before."""

    def __init__(self, count, call=interrupt):
        self.left, self.fired, self.call = count, False, call

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, trace):
        sys.settrace(None)
        return kind is Interrupt

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left < 0:
                self.fired = True
                sys.settrace(None)
                self.call()
        return self._trace


class AtMonitoredOpcode:
    """The same by ``sys.monitoring`` of Python 3.12, to which no opcode is lost."""

    TOOL = 3  # of those that are nobody's

    def __init__(self, count, call=interrupt):
        self.left, self.fired, self.call = count, False, call

    def __enter__(self):
        if sys.monitoring.get_tool(self.TOOL) is None:
            sys.monitoring.use_tool_id(self.TOOL, "AtOpcode")
        event = sys.monitoring.events.INSTRUCTION
        sys.monitoring.register_callback(self.TOOL, event, self._before)
        sys.monitoring.set_events(self.TOOL, event)
        return self

    def __exit__(self, kind, error, trace):
        sys.monitoring.set_events(self.TOOL, 0)
        return kind is Interrupt

    def _before(self, code, offset):
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        self.left -= 1
        if self.left < 0:
            self.fired = True
            sys.monitoring.set_events(self.TOOL, 0)
            self.call()
        return None


AtOpcode = AtMonitoredOpcode if hasattr(sys, "monitoring") else AtTracedOpcode


class ByAlarm:
    """Raises Interrupt from a signal's handler ``delay`` seconds from now, and again after each of ``others``."""

    def __init__(self, delay, others=()):
        self.delays, self.fired, self.took, self.active = [delay, *others], 0, 0.0, False
        signal.signal(signal.SIGALRM, self._handle)

    def __enter__(self):
        self.active, self.start = True, time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self.delays[0])

    def __exit__(self, kind, error, trace):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.active, self.took = False, time.perf_counter() - self.start
        return kind is Interrupt

    def _handle(self, number, frame):
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is None or not self.active:  # not in a call of attncore; the signal may have been sent to a thread
            return
        self.fired += 1
        if self.fired < len(self.delays):
            signal.setitimer(signal.ITIMER_REAL, self.delays[self.fired])
        raise Interrupt


class Engine(StepChecks):
    """A batch and a builder with their model: ``requests``, and the order of rows that follows ``metadata.moves``."""

    ranks, pad_seq_len = None, 0

    def __init__(self, seed, groups="one group", *, kernels="cython", fills=False, transport="auto", threshold=2):
        self.draw = np.random.default_rng(seed)
        self.groups, self.threshold = GROUPS[groups], threshold
        self.one_group = groups == "one group"
        own = {"block_size": 4} if self.one_group else {"groups": self.groups}
        own["max_encoder_len"] = MAX_ENCODER if groups == "cross" else None
        self.batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, kernels=kernels, **own)
        self.builder = MetadataBuilder(
            self.batch, max_num_batched_tokens=MAX_TOKENS, decode_threshold=threshold, transport=transport,
            max_num_encoder_tokens=MAX_REQS * MAX_ENCODER,
        )  # fmt: skip
        if fills:
            self.builder.register_field("lengths", np.int32, "request", lambda m, out: np.copyto(out, m.host.seq_lens))
        self.requests, self.rows, self.captured = {}, [None] * MAX_REQS, {}
        self.next_id, self.next_block, self.num_steps, self.addresses = 0, 1, 0, defaultdict(dict)

    # The state: what the batch says, and what the model says.

    def found(self):
        order = self.batch._core.order
        return {
            name: (self.by_name(self.batch.block_ids(name)), self.batch.num_computed_tokens(name),
                   self.batch.encoder_seq_len(name), order.row_of[name], order.row_of[name] in order.paused)
            for name in self.batch.req_ids
        }, self.builder.last_step + 1, self.builder.captured  # fmt: skip

    def expected(self):
        return {
            name: (request.blocks, request.computed, request.encoder, self.rows.index(name), request.paused)
            for name, request in self.requests.items()
        }, self.num_steps, tuple(sorted(self.captured))  # fmt: skip

    def by_name(self, given):
        return {self.groups[0].name: given} if self.one_group else given

    def check_rows(self):
        """What the batch keeps of its rows agrees, and rows without a request are empty."""
        core = self.batch._core
        ids = core.order.req_ids
        held = {name: row for row, name in enumerate(ids) if name is not None}
        assert core.order.row_of == held
        assert core.order.holes == set(range(len(ids))) - set(held.values())
        assert core.order.paused <= set(held.values())
        assert core.state.num_rows == len(ids)
        assert not ids or ids[-1] is not None
        assert not core.moving
        free = sorted(set(range(MAX_REQS)) - set(held.values()))
        for table in core.tables.values():
            assert not table.array[free].any()
            assert not table._lengths[0, free].any()

    def make(self, function, interrupt):
        with interrupt:
            function()

    def call(self, function, change, interrupt):
        """Makes a call that ``change`` does to the model, under ``interrupt``; whether it has happened."""
        before = self.expected()
        self.make(function, interrupt)
        found = self.found()
        happened = found != before
        if happened:
            change()
            assert found == self.expected(), (found, self.expected())
        self.check_rows()
        assert not self.batch._core.state.busy
        return happened

    # The calls.

    def add(self):
        name = f"r{self.next_id}"
        self.next_id += 1
        encoder = int(self.draw.integers(0, 9)) if self.groups[-1].cross else 0
        blocks = {
            g.name: self.fresh(-(-encoder // 4) if g.cross else 2 if g.block_size == 8 else 4) for g in self.groups
        }
        computed = int(self.draw.integers(0, 9))

        def change():
            self.requests[name] = Request(blocks, computed, encoder, False)
            self.rows[self.rows.index(None)] = name

        options = {"encoder_seq_len": encoder} if encoder else {}
        return lambda: self.batch.add_request(name, self.as_given(blocks), computed, **options), change

    def remove(self):
        name = self.any()

        def change():
            del self.requests[name]
            self.rows[self.rows.index(name)] = None

        return lambda: self.batch.remove_request(name), change

    def preempt(self):
        request = self.requests[name := self.any()]

        def change():
            request.blocks = {group.name: [] for group in self.groups}
            request.computed, request.paused, request.encoded = 0, True, False

        return lambda: self.batch.preempt(name), change

    def append(self):
        more = {}
        for name, request in self.requests.items():
            count = {g.name: min(self.width(g) - len(request.blocks[g.name]), 1 + request.paused) for g in self.groups}
            more[name] = {g.name: self.fresh(count[g.name]) for g in self.groups}

        def change():
            for name, blocks in more.items():
                for group, ids in blocks.items():
                    self.requests[name].blocks[group] = self.requests[name].blocks[group] + ids
                if any(self.requests[name].blocks[g.name] for g in self.groups if not g.cross):
                    self.requests[name].paused = False

        return lambda: self.batch.append_blocks_many({n: self.as_given(b) for n, b in more.items()}), change

    def replace(self):
        group = self.groups[int(self.draw.integers(len(self.groups)))]
        request = self.requests[name := self.any()]
        held, (block,) = request.blocks[group.name], self.fresh(1)
        if not held:
            return None
        index = int(self.draw.integers(len(held)))

        def change():
            request.blocks[group.name] = [*held[:index], block, *held[index + 1 :]]

        return lambda: self.batch.replace_block(name, index, block, group.name), change

    def truncate(self):
        group, request = self.groups[0], self.requests[name := self.any()]
        held, count = request.blocks[group.name], -(-request.computed // group.block_size)
        if count == len(held):
            return None

        def change():
            request.blocks[group.name] = held[:count]

        return lambda: self.batch.truncate_blocks(name, count, group.name), change

    def rollback(self):
        fewer = {n: int(self.draw.integers(1, r.computed + 1)) for n, r in self.requests.items() if r.computed}
        for group in self.groups:
            if group.sliding_window is not None:  # not into what a window has passed
                fewer = {n: k for n, k in fewer.items() if 0 not in self.requests[n].blocks[group.name]}
        if not fewer:
            return None

        def change():
            for name, count in fewer.items():
                self.requests[name].computed -= count

        return lambda: self.batch.rollback_many(fewer), change

    def release_passed(self):
        after = {}
        for name, request in self.requests.items():
            for group in self.groups:
                passed = max(request.computed + 1 - (group.sliding_window or MAX_LEN + 1), 0) // group.block_size
                held = request.blocks[group.name]
                first = stop = min(passed, len(held))
                while first and held[first - 1]:
                    first -= 1
                if first < stop:
                    after[name, group.name] = held[:first] + [0] * (stop - first) + held[stop:]
        if not after:
            return None

        def change():
            for (name, group), blocks in after.items():
                self.requests[name].blocks[group] = blocks

        return lambda: self.batch.release_passed_blocks(), change

    def swap(self):
        rows = [row for row, name in enumerate(self.rows) if name is not None]
        i, j = int(self.draw.choice(rows)), int(self.draw.choice(rows))
        if i == j:
            return None

        def change():
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]

        return lambda: self.batch.swap_rows(i, j), change

    def capture(self):
        size, each = int(self.draw.integers(1, MAX_REQS + 1)), int(self.draw.integers(1, self.threshold + 1))
        if size in self.captured:
            return None

        def change():
            self.captured[size], self.num_steps = each, self.num_steps + 1

        return lambda: self.builder.capture(size, each), change

    def release(self):
        if not self.captured:
            return None
        size = int(self.draw.choice(sorted(self.captured)))
        return lambda: self.builder.release(size), lambda: self.captured.pop(size)

    def build(self):
        each, bucket = None, None
        if self.captured and self.draw.random() < 0.4:
            bucket = int(self.draw.choice(sorted(self.captured)))
            each = self.captured[bucket]
        scheduled, left = {}, MAX_TOKENS
        for name, request in self.requests.items():
            room = max(min(self.room(request), left), 0) if self.ready(request) else 0
            count = int(self.draw.choice([0, 1, 1, 1, 2, 7]))
            if each is not None:
                fits = (
                    room >= each
                    and (request.encoded or not request.encoder)
                    and sum(map(bool, scheduled.values())) < bucket
                )
                count = each if fits else 0
            scheduled[name] = min(count, room)
            left -= scheduled[name]
        scheduled = self.without_null(scheduled)
        ready = all(self.ready(r) and self.room(r) > 0 for r in self.requests.values())
        if each is None and ready and self.draw.random() < 0.5 and set(self.without_null({}).values()) <= {1}:
            scheduled = {}
        return lambda: self.builder.build(scheduled, bucket=bucket), lambda: self.stepped(scheduled, bucket)

    def stepped(self, scheduled, bucket):
        """Checks every field of the last step, and takes it into the model."""
        metadata = self.builder.last_metadata
        queries = {n: scheduled.get(n, 0 if r.paused else 1) for n, r in self.requests.items()}
        for i, j in metadata.moves:
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        running = [name for name in self.rows if name is not None and queries[name]]
        assert list(metadata.req_ids) == running
        self.check(metadata, [(self.requests[name], queries[name]) for name in running], bucket)
        for name in running:
            self.requests[name].computed += queries[name]
            self.requests[name].encoded = True
        self.num_steps += 1

    def any(self):
        return str(self.draw.choice(sorted(self.requests)))

    def next_call(self):
        """A call that fits the batch, of those that an engine makes, and what it does to the model."""
        while True:
            names = ["build", "build", "build", "append", "rollback", "remove", "preempt", "replace", "truncate",
                     "release_passed", "swap", "capture", "release"]  # fmt: skip
            name = "add" if len(self.requests) < 3 else str(self.draw.choice(names))
            if name not in ("add", "remove") and len(self.requests) < MAX_REQS and self.draw.random() < 0.3:
                name = "add"
            found = getattr(self, name)()
            if found is not None:
                return name, *found
