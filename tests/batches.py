"""Random sequences of calls on a batch: after every build, every field is compared with the plain-Python oracle.

Batches of one KV-cache group and of several (windowed, of other block sizes, expanded to kernel blocks, cross), with
drafts, steps padded for captured sizes, and ranks of a context-parallel group. The model knows its requests by id, and
by an engine's own per-row list, which follows ``add_request``, ``swap_rows`` and ``metadata.moves`` only. A refused
call must leave every byte as it was.
"""

import numpy as np
import oracles
import pytest
from core_state import core_state
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder
from attncore.builder.device import by_copy, tables
from attncore.errors import CaptureError

MAX_REQS, MAX_LEN, MAX_TOKENS, MAX_ENCODER = 6, 46, 64, 20
ENTRIES = ((by_copy, "JOURNAL_ENTRIES", 5), (tables, "SURPLUS_ENTRIES", 3))
"""Small, so that steps often have more to send than fits; other tests have the usual sizes."""

GROUPS = {
    "one": None,
    "full and sliding": [KVCacheGroup("full", 4), KVCacheGroup("window", 4, sliding_window=6)],
    "other sizes": [KVCacheGroup("a", 3), KVCacheGroup("b", 16), KVCacheGroup("c", 3), KVCacheGroup("d", 1)],
    "expanded": [KVCacheGroup("small", 8), KVCacheGroup("large", 12, kernel_block_size=4, sliding_window=5)],
    "cross": [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 8, kernel_block_size=4, cross=True)],
}


def address_of(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


class Request:
    def __init__(self, blocks, computed, encoder, encoded):
        self.blocks, self.computed, self.paused = blocks, computed, False
        self.encoder, self.encoded = encoder, encoded


class Batches(RuleBasedStateMachine):
    kernels = "cython"

    @initialize(
        groups_of=st.sampled_from(["one", "ranks of groups", *GROUPS]), block_size=st.sampled_from([1, 3, 4, 16]),
        depth=st.integers(1, 3),
        planned=st.booleans(), threshold=st.integers(1, 3), world=st.integers(1, 3), data=st.data(),
        transport=st.integers(0, 1), pad_seq_len=st.integers(0, 1),
    )  # fmt: skip
    def start(self, groups_of, block_size, depth, planned, threshold, world, transport, pad_seq_len, data):
        self.usual = [(module, name, getattr(module, name)) for module, name, _ in ENTRIES]
        for module, name, few in ENTRIES:
            setattr(module, name, few)
        if groups_of == "one":
            own = {"block_size": block_size * world}
            self.groups = [KVCacheGroup("decoder", block_size * world)]
        elif groups_of == "ranks of groups":
            size = block_size * world
            own = {"groups": [KVCacheGroup("plain", size), KVCacheGroup("expanded", 2 * size, kernel_block_size=size)]}
            self.groups = own["groups"]
        else:
            world = 1
            own = {"groups": GROUPS[groups_of], "max_encoder_len": MAX_ENCODER if groups_of == "cross" else None}
            self.groups = GROUPS[groups_of]
        self.one_group = groups_of == "one"
        self.ranks = None
        if world > 1:
            interleave = data.draw(st.sampled_from([n for n in (1, 2, 4) if block_size % n == 0]))
            self.ranks = ContextParallel(world, data.draw(st.integers(0, world - 1)), block_size, interleave)
        self.batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, kernels=self.kernels, **own)
        self.threshold = threshold
        self.builder = MetadataBuilder(
            self.batch, self.backend(), max_num_batched_tokens=MAX_TOKENS, depth=depth,
            transport=self.transports[transport],
            max_num_encoder_tokens=MAX_REQS * MAX_ENCODER, decode_threshold=threshold, context_parallel=self.ranks,
        )  # fmt: skip
        self.builder._backends.pad_seq_len = self.pad_seq_len = pad_seq_len
        self.plan_fails, self.planned = False, planned
        if planned:  # as the builder does for a backend with a plan
            self.builder._backends.plans = ((self.groups[0].name, self.plan),)
            self.builder._longer, self.builder._decode_step = True, lambda: None
            self.builder._padded_step = lambda bucket: None
        self.requests = {}
        self.rows = [None] * MAX_REQS  # what an engine keeps beside the batch
        self.next_id = 0
        self.next_block = 1
        self.captured = {}
        self.addresses = {}
        for size in sorted(data.draw(st.sets(st.sampled_from([1, 3, MAX_REQS]))), reverse=True):
            self.capture(size, data.draw(st.integers(1, threshold)))
        for _ in range(data.draw(st.integers(0, MAX_REQS))):
            self.add(data, data.draw(st.integers(0, MAX_LEN - 8)), 1, data.draw(st.integers(0, 20)))

    def teardown(self):
        for module, name, usual in getattr(self, "usual", ()):
            setattr(module, name, usual)

    def backend(self):
        """What the builder builds for; None: NumPy arrays."""

    transports = ("auto", "copy")

    def captured_now(self, size, metadata):
        """What an engine does after ``capture``: capture its model."""

    def run(self, size, metadata):
        """What an engine does with a step built for a graph: replay it."""

    # ---- what the model knows ----------------------------------------------------------------------------------------

    def fresh(self, count):
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return blocks

    def some(self, data, ids=None):
        return data.draw(st.sampled_from(sorted(self.requests if ids is None else ids)))

    def width(self, group):
        return oracles.cdiv(MAX_ENCODER if group.cross else MAX_LEN, group.block_size)

    def columns(self, group, blocks):
        """The manager's blocks as the kernel's."""
        size = group.kernel_block_size or group.block_size
        each = group.block_size // size
        return size, [block * each + k for block in blocks for k in range(each)]

    def as_given(self, by_group):
        return by_group[self.groups[0].name] if self.one_group else by_group

    def room(self, request):
        own = [len(request.blocks[group.name]) * group.block_size for group in self.groups if not group.cross]
        return min(*own, MAX_LEN) - request.computed

    def ready(self, request):
        """Whether the request can run: a preempted one also needs its encoder's blocks again."""
        cross = [len(request.blocks[group.name]) * group.block_size for group in self.groups if group.cross]
        return not request.paused and (request.encoded or not cross or cross[0] >= request.encoder)

    def frozen(self):
        return core_state(self.batch), [memory.tobytes() for memory in self.builder._assembly.ring.memory]

    def batch_bytes(self):
        """What a caller can tell of the batch: the cached block of a row is not among it."""
        return core_state(self.batch, blocks_in_use=False)

    # ---- requests come, go and change --------------------------------------------------------------------------------

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
        blocks[index] = block

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
                    if index < len(request.blocks[group.name]) and request.blocks[group.name][index] == 0:
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

    # ---- steps -------------------------------------------------------------------------------------------------------

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

    def without_null(self, scheduled):
        """Requests whose next tokens would go to a null block (made null by a window) do not run."""
        for name, request in self.requests.items():
            count = scheduled.get(name, 0 if request.paused else 1)
            for group in self.groups:
                if not group.cross and count and not request.paused:
                    first, last = (
                        request.computed // group.block_size,
                        (request.computed + count - 1) // group.block_size,
                    )
                    if 0 in request.blocks[group.name][first : last + 1]:
                        scheduled[name] = 0
        return scheduled

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
            with pytest.raises(ValueError, match=f"bucket: {size} rows were captured, but this step has"):
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
        with pytest.raises(ValueError, match=r"(holds \d+ blocks but token|exceed max_model_len|the null block)"):
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
        before = self.batch_bytes()
        self.plan_fails = True
        with pytest.raises(RuntimeError, match="no plan"):
            self.builder.build(self.without_null(scheduled))
        self.plan_fails = False
        assert self.batch_bytes() == before

    @precondition(lambda self: self.planned)
    @rule(data=st.data(), size=st.integers(1, MAX_REQS), known=st.booleans())
    def fail_to_plan_a_captured_size(self, data, size, known):
        """A padded step, an empty step or the capture itself: the batch and the captured sizes do not change."""
        if known and self.captured:
            size = data.draw(st.sampled_from(sorted(self.captured)))
        before, captured, each = self.batch_bytes(), self.builder.captured, self.captured.get(size, 1)
        able = [n for n, r in sorted(self.requests.items())
                if self.ready(r) and self.room(r) >= each and (r.encoded or not r.encoder)]  # fmt: skip
        scheduled = self.without_null(dict.fromkeys(self.requests, 0) | dict.fromkeys(able[:size], each))
        calls = [lambda: self.builder.capture(size, each)]
        if size in self.captured:
            calls += [lambda: self.builder.build_empty(size), lambda: self.builder.build(scheduled, bucket=size)]
        self.plan_fails = True
        with pytest.raises(RuntimeError, match="no plan"):
            data.draw(st.sampled_from(calls))()
        self.plan_fails = False
        assert (self.batch_bytes(), self.builder.captured) == (before, captured)

    def step(self, scheduled, bucket=None):
        queries = {n: scheduled.get(n, 0 if r.paused else 1) for n, r in self.requests.items()}
        metadata = self.builder.build(scheduled, bucket=bucket)
        if bucket is not None:
            self.run(bucket, metadata)
        for i, j in metadata.moves:
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        running = {name for name, query_len in queries.items() if query_len}
        assert set(metadata.req_ids) == running
        assert self.rows[: len(running)] == list(metadata.req_ids)
        kinds = [queries[name] <= self.threshold for name in metadata.req_ids]
        assert kinds == sorted(kinds, reverse=True)
        self.check(metadata, [(self.requests[name], queries[name]) for name in metadata.req_ids], bucket)
        for name in running:
            self.requests[name].computed += queries[name]
            self.requests[name].encoded = True

    def check(self, metadata, running, bucket):
        encoder = {}
        if self.groups[-1].cross:
            size, _ = self.columns(self.groups[-1], [])
            held = [self.columns(self.groups[-1], r.blocks[self.groups[-1].name])[1] for r, _ in running]
            rows = [(b, r.encoder, 0 if r.encoded else r.encoder) for b, (r, _) in zip(held, running, strict=True)]
            encoder = oracles.persistent_encoder(rows, size)
        for group in self.groups:
            rows = [(*self.columns(group, r.blocks[group.name])[1:], r.computed, q) for r, q in running]
            self.check_group(metadata, group, rows, encoder, bucket)

    def check_group(self, metadata, group, rows, encoder, bucket):
        of_group = metadata.groups[group.name]
        size, _ = self.columns(group, [])
        if group.cross:
            expected = oracles.lengths([b for b, _, _ in rows], encoder["encoder_seq_lens"], size, 0)
            expected = {n: expected[n] for n in ("seq_lens", "seq_start_loc", "paged_kv_indices", "max_seq_len")}
        elif self.ranks:
            ranks = self.ranks
            own = ranks.block_size, ranks.world_size, ranks.rank, ranks.interleave
            expected = oracles.rank_step(rows, *own, self.threshold)
        else:
            expected = oracles.persistent_step(rows, size, self.threshold)
        if bucket is not None and not group.cross:
            expected = oracles.padded(expected | encoder, bucket, self.captured[bucket], self.pad_seq_len)
        elif bucket is None:
            expected |= encoder
        for name, value in expected.items():
            if bucket is not None and group.cross and name != "paged_kv_indices":
                continue  # what a cross group shares is looked at with the others
            for found in (getattr(of_group, name), getattr(of_group.host, name, None)):
                if found is not None:
                    assert (found.tolist() if hasattr(found, "tolist") else found) == value, name
        for row, (blocks, _, _) in enumerate(rows):
            tail = [0] * (of_group.block_table.shape[1] - len(blocks))
            assert of_group.host.block_table[row].tolist() == blocks + tail
            assert of_group.block_table[row].tolist()[: len(blocks)] == blocks
        if bucket is not None:
            assert of_group.use_cuda_graph
            for name, address in self.addresses[bucket].items():
                if group.name == self.groups[0].name:
                    assert address_of(of_group._device[name]) == address
        elif not self.ranks and not group.cross:
            self.check_views(of_group, rows, size)

    def check_views(self, metadata, rows, block_size):
        decodes = [row for row in rows if row[2] <= self.threshold]
        prefills = rows[len(decodes) :]
        for part, view in ((decodes, metadata.decode_metadata), (prefills, metadata.prefill_metadata)):
            if not part:
                assert view is None
                continue
            for name, expected in oracles.persistent_step(part, block_size, self.threshold).items():
                for value in (getattr(view, name), getattr(view.host, name, None)):
                    if value is not None:
                        assert (value.tolist() if hasattr(value, "tolist") else value) == expected, name

    @invariant()
    def agrees(self):
        if not hasattr(self, "batch"):
            return
        assert self.batch.num_reqs == len(self.requests)
        needy = set()
        for name, request in self.requests.items():
            assert self.batch.block_ids(name) == self.as_given(request.blocks)
            assert self.batch.num_computed_tokens(name) == request.computed
            for group in self.groups:
                if group.cross or request.paused:
                    continue
                if len(request.blocks[group.name]) <= request.computed // group.block_size < self.width(group):
                    needy.add(name)
        assert set(self.batch.needs_block()) == needy
        held = {row for row, name in enumerate(self.rows) if name is not None}
        for table in self.batch.core.tables.values():
            for row in set(range(MAX_REQS)) - held:
                assert not table.array[row].any()
