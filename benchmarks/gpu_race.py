"""The longer race: steps at random, compared in stream order with what plain host lists say.

The device falls behind by random delays; graphs and eager steps, empty steps and steps taken back are mixed; a plan
copies from the step's own host views, later than it returns. What a step saw is compared on the device, so that no look
at it slows the host down; ``wrong`` steps are counted there.
"""

import builder_insides
import numpy as np
import torch
from gpu_work import BLOCK_SIZE, Backend, captured

from attncore import InputBatch, MetadataBuilder
from attncore.builder.slices import own_array

ROWS, MAX_LEN, MAX_TOKENS = 64, 1024, 512
WIDTH = MAX_LEN // BLOCK_SIZE
BUCKETS = (1, 4, 16, 48, 64)
NUM_BLOCKS = 8192
KINDS = ("graph", "eager", "prefill", "empty", "abandoned", "dropped", "plan failed")
NAMES = ("seq_lens", "paged_kv_indptr", "paged_kv_last_page_len", "query_start_loc")


class CopyingPlan(Backend):
    """Its copy is read from the arena after plan has returned: the receipt must cover it."""

    def __init__(self, device, staging):
        self.plan_staging = staging
        super().__init__(device, needs=NAMES)  # of a field that is not declared a dummy replay sees the last step's
        self.copied = torch.zeros(ROWS + 1, dtype=torch.int32, device=device)
        self.fails = False

    def plan(self, metadata):
        indptr = torch.from_numpy(own_array(metadata.host, "paged_kv_indptr"))  # the pinned memory itself
        self.copied[: len(indptr)].copy_(indptr, non_blocking=True)
        if self.fails:
            raise ZeroDivisionError


class Requests:
    """The oracle: every request's blocks and tokens, in arrays of its own."""

    def __init__(self, rng):
        self.rng = rng
        self.blocks = np.zeros((ROWS, WIDTH), np.int32)
        self.num_blocks, self.computed = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)
        self.place = {}  # request -> row of these arrays
        self.paused = set()  # those that were preempted, and wait for blocks
        self.preemptions = 0
        self.unused = list(range(ROWS))
        self.free = list(map(int, rng.permutation(np.arange(1, NUM_BLOCKS))))
        self.next_name = 0

    def churn(self, batch, most):
        rng = self.rng
        while len(self.place) < most and rng.random() < 0.6:
            place, length = self.unused.pop(), int(rng.integers(1, 900))
            name, self.next_name = self.next_name, self.next_name + 1
            count = length // BLOCK_SIZE + 1
            self.blocks[place, :count] = [self.free.pop() for _ in range(count)]
            self.num_blocks[place], self.computed[place] = count, length
            self.place[name] = place
            batch.add_request(name, self.blocks[place, :count].copy(), length)
        gone = [name for name, place in self.place.items() if self.computed[place] >= MAX_LEN - 40]
        if self.place and rng.random() < 0.25:
            gone.append(list(self.place)[int(rng.integers(len(self.place)))])
        for name in set(gone):
            self.give_back(name)
            self.unused.append(self.place.pop(name))
            self.paused.discard(name)
            batch.remove_request(name)
        self.paused -= {name for name in list(self.paused) if rng.random() < 0.2}
        if len(self.place) > len(self.paused) and rng.random() < 0.1:
            name = self.running()[int(rng.integers(len(self.running())))]
            batch.preempt(name)
            self.give_back(name)
            self.num_blocks[self.place[name]] = self.computed[self.place[name]] = 0
            self.paused.add(name)
            self.preemptions += 1
        if self.place and rng.random() < 0.1:
            name = list(self.place)[int(rng.integers(len(self.place)))]
            place = self.place[name]
            back = min(int(rng.integers(1, 5)), int(self.computed[place]))
            batch.rollback(name, back)
            self.computed[place] -= back

    def running(self):
        """Requests that take part in a step: those that were preempted begin anew with the blocks that they get."""
        return [name for name in self.place if name not in self.paused]

    def give_back(self, name):
        place = self.place[name]
        self.free[:0] = map(int, self.blocks[place, : self.num_blocks[place]])

    def give_blocks(self, batch, query_lens):
        """So that every running request has room for its tokens of this step (by name; others one)."""
        more = {}
        for name in self.running():
            place = self.place[name]
            need = -(-(self.computed[place] + query_lens.get(name, 1)) // BLOCK_SIZE)
            have = self.num_blocks[place]
            if need > have:
                new = [self.free.pop() for _ in range(need - have)]
                self.blocks[place, have:need] = new
                self.num_blocks[place] = need
                more[name] = new
        batch.append_blocks_many(more)

    def expected(self, names, query_lens, rows, tokens):
        """What a step of these requests holds, padded to so many rows and tokens (0: as it is)."""
        places = np.fromiter((self.place[name] for name in names), np.int64, len(names))
        query = np.fromiter((query_lens.get(name, 1) for name in names), np.int64, len(names))
        start = self.computed[places]
        ends = np.cumsum(query)
        row = np.repeat(np.arange(len(names)), query)
        positions = start[row] + np.arange(len(row)) - (ends - query)[row]
        slots = self.blocks[places[row], positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        lens = start + query
        pages = -(-lens // BLOCK_SIZE)
        flat = self.blocks[places][np.arange(WIDTH) < pages[:, None]]
        pad, more = max(rows - len(names), 0), max(tokens - len(slots), 0)
        indptr = np.concatenate([[0], np.cumsum(pages)])
        starts = np.concatenate([[0], ends])
        words = [
            np.pad(lens, (0, pad)), np.pad(indptr, (0, pad), "edge"), np.pad((lens - 1) % BLOCK_SIZE + 1, (0, pad)),
            np.pad(starts, (0, pad), "edge"), flat,
        ]  # fmt: skip
        self.computed[places] += query
        # Positions of padded tokens belong to no request: they are not compared.
        return np.concatenate([np.pad(slots, (0, more), constant_values=-1), positions, *words]), len(positions)


def race(steps, depth, transport, device, seed, plan_staging="per_slot", receipts=True, ticket=False, drops=0.0):
    """Steps run, wrong ones among them, and what they were.

    With ``ticket`` graphs are replayed by themselves, and of builds for a graph a part of ``drops`` is never replayed.
    Dummy replays come without a build then, if the transport is ``graph``: over ``copy`` such a replay runs the step
    that was sent last.
    ``receipts`` False is the control: no arena is waited for, the device is late in every step; some must go wrong.
    """
    run = Race(depth, transport, device, seed, plan_staging, receipts=receipts, ticket=ticket, drops=drops)
    while run.done < steps:
        run.turn()
    return {
        "transport": transport, "depth": depth, "ticket": ticket, "drops": drops, "plan_staging": plan_staging,
        "receipts": receipts, "steps": run.done, "wrong": int(run.wrong), "first_wrong": int(run.first_wrong),
        "kinds": run.kinds | {"preempted": run.requests.preemptions},
    }  # fmt: skip


class Race:
    """One builder and the oracle beside it, turn by turn; what went wrong is counted on the device."""

    def __init__(self, depth, transport, device, seed, plan_staging, *, receipts, ticket, drops):
        self.rng = np.random.default_rng(seed)
        self.device, self.cuda, self.transport = device, device != "cpu", transport
        self.receipts, self.ticket, self.drops = receipts, ticket, drops
        self.builds_dummies = not ticket or transport == "copy"
        self.batch = InputBatch(max_num_reqs=ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self.backend = CopyingPlan(device, plan_staging)
        self.builder = builder_of(self.batch, self.backend, transport, depth, ticket)
        side, self.models = builder_insides.side(self.builder), {}
        pages = side.page_buffer(0)
        for size in BUCKETS:
            self.models[size] = model_of(self.builder.capture(size), pages, device, self.batch)
        if not receipts:
            builder_insides.take_longer_way(self.builder)
            side.wait = lambda step: None
        self.requests, self.kinds = Requests(self.rng), dict.fromkeys(KINDS, 0)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.first_wrong = torch.full((), -1, device=device)
        self.done, self.most, self.dropped = 0, ROWS // 2, False
        self.metadata = None  # of the last step: it lives until the next one is built

    def turn(self):
        """One step of a kind at random; all but a dropped one are compared, and counted in ``done``."""
        rng = self.rng
        if rng.random() < 0.01:
            self.most = int(rng.integers(1, ROWS + 1))
        self.requests.churn(self.batch, self.most)
        if self.cuda:
            fall_behind(rng, always=not self.receipts)
        query_lens = {name: 0 for name in self.requests.running() if rng.random() < 0.03}
        kind = rng.random()
        if kind < 0.05 and (self.builds_dummies or not self.dropped):  # a replay after a dropped build would run that
            size, expected, num_positions = self.empty_step()
        else:
            prefill = kind < 0.15 and self.requests.running()
            size = self.prepare(query_lens, prefill, eager=kind < 0.35)
            self.take_back(query_lens, size)
            self.metadata = self.builder.build(query_lens, bucket=size)
            if size and self.ticket and rng.random() < self.drops:
                self.requests.expected(self.metadata.req_ids, query_lens, 0, 0)  # its tokens are booked, it is not run
                self.kinds["dropped"] += 1
                self.dropped = True
                return
            if size:
                replay(self.metadata, self.models[size][0], self.ticket)
            expected, num_positions = self.requests.expected(self.metadata.req_ids, query_lens, size or 0, size or 0)
            self.kinds["graph" if size else "prefill" if prefill else "eager"] += 1
        self.dropped = False
        self.compare(size, expected, num_positions)
        self.done += 1

    def empty_step(self):
        """A replay of a graph without requests: its size, what it should see, and how many positions."""
        size = int(self.rng.choice(BUCKETS))
        self.metadata = self.builder.build_empty(size) if self.builds_dummies else self.models[size][3]
        replay(self.metadata, self.models[size][0], self.ticket)
        expected, num_positions = self.requests.expected((), {}, size, size)
        self.kinds["empty"] += 1
        return size, expected, num_positions

    def prepare(self, query_lens, prefill, *, eager):
        """Give the requests their blocks, in a prefill some more tokens; the graph's size, None without one."""
        requests = self.requests
        if prefill:
            for name in requests.running()[-2:]:
                query_lens[name] = int(self.rng.integers(2, 40))
        requests.give_blocks(self.batch, query_lens)
        running = len(requests.running()) - sum(not count for count in query_lens.values())
        return None if prefill or eager else next(size for size in BUCKETS if size >= running)

    def take_back(self, query_lens, size):
        """Now and then the same step before it is built to stay: with a plan that fails, or abandoned."""
        if self.rng.random() < 0.02:
            self.backend.fails = True
            try:
                self.builder.build(query_lens, bucket=size)
            except ZeroDivisionError:
                self.kinds["plan failed"] += 1
            self.backend.fails = False
        if size and self.transport == "graph" and not self.ticket and self.rng.random() < 0.02:
            self.builder.build(query_lens, bucket=size).abandon()
            self.kinds["abandoned"] += 1

    def compare(self, size, expected, num_positions):
        """Count on the device whether the step, or its plan, saw anything but what was expected."""
        metadata = self.metadata
        seen = self.models[size][1] if size else fields_of(metadata)
        num_pages = len(expected) - num_positions - metadata.num_tokens - 4 * metadata.num_reqs - 2
        seen_pages = self.models[size][2] if size else metadata.paged_kv_indices
        sent = torch.from_numpy(expected)
        sent = sent.pin_memory().to(self.device, non_blocking=True) if self.cuda else sent
        found = [seen[0], seen[1][:num_positions], *seen[2:], seen_pages[:num_pages]]
        bad = (torch.cat([one.long() for one in found]) != sent).any()
        indptr = sent[metadata.num_tokens + num_positions + metadata.num_reqs :][: metadata.num_reqs + 1]
        if num_positions or self.builds_dummies:  # a replay without a build was not planned
            bad |= (self.backend.copied[: metadata.num_reqs + 1] != indptr).any()
        self.first_wrong.copy_(torch.where(bad & (self.first_wrong < 0), self.done, self.first_wrong))
        self.wrong += bad


def builder_of(batch, backend, transport, depth, ticket):
    """A builder with the transport asked for; the race ends where another was chosen."""
    options = {"ticket": True} if ticket else {}
    builder = MetadataBuilder(
        batch, backend, max_num_batched_tokens=MAX_TOKENS, transport=transport, depth=depth, **options
    )
    if builder.transport != transport:
        raise SystemExit(f"transport: {builder.transport}, not {transport}: {builder.why_transport}")
    return builder


def fall_behind(rng, *, always):
    """Now and then the device sleeps, for up to 8 ms: longer than the host needs for several steps."""
    chance = rng.random()
    if always or chance < 0.02:
        torch.cuda._sleep(int(rng.integers(1, 15_000_000)))
    elif chance < 0.35:
        torch.cuda._sleep(int(rng.integers(1, 1_500_000)))


class Dummy:
    """The shape of a replay that belongs to no build."""

    def __init__(self, size):
        self.num_reqs = self.num_tokens = size


def replay(metadata, graph, ticket):
    if ticket:
        graph.replay()
    else:
        metadata.replay(graph)


def fields_of(metadata):
    return [metadata.slot_mapping, metadata.positions, *(getattr(metadata, name) for name in NAMES)]


def model_of(metadata, pages, device, batch):
    """A captured step that keeps what it sees: (graph, fields, page indices, a dummy of its shape)."""
    num_pages = metadata.num_reqs * WIDTH
    seen, seen_pages = [torch.zeros_like(one) for one in fields_of(metadata)], torch.zeros_like(pages[:num_pages])

    def model():
        metadata.record()
        for kept, field in zip(seen, fields_of(metadata), strict=True):
            kept.copy_(field)
        seen_pages.copy_(pages[:num_pages])

    if device != "cpu":
        torch.cuda.synchronize()
    return captured(model, device), seen, seen_pages, Dummy(metadata.num_reqs)
