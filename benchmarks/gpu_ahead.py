"""Steps ahead on a GPU: random runs against plain host lists, controls that fail, and what a step costs.

    python benchmarks/gpu_ahead.py --steps 100000 --save ahead.json

``--device cpu --steps 300`` tries the code over the transport copy. Exit code 1: a step was wrong, or a control right.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter_ns

import builder_insides
import numpy as np
import torch
from gpu_race import BUCKETS, MAX_LEN, NAMES, NUM_BLOCKS, ROWS, WIDTH, Requests, builder_of, fall_behind, fields_of
from gpu_work import BLOCK_SIZE, Backend, captured, synchronize

from attncore import InputBatch

COUNTS = (1, 4, 8)  # steps that a graph is captured with
MOST = 16


class Model:
    """Graphs of some steps of a size, each of which keeps what every step sees."""

    def __init__(self, metadata, pages, device):
        num_pages = metadata.num_reqs * WIDTH
        self.seen = [[torch.zeros_like(one) for one in fields_of(metadata)] for _ in range(max(COUNTS))]
        self.pages = [torch.zeros_like(pages[:num_pages]) for _ in range(max(COUNTS))]

        def model(count):
            for step in range(count):
                metadata.record_next() if step else metadata.record()
                for kept, field in zip(self.seen[step], fields_of(metadata), strict=True):
                    kept.copy_(field)
                self.pages[step].copy_(pages[:num_pages])

        synchronize()
        self.graphs = {count: captured(lambda count=count: model(count), device) for count in COUNTS}


class AheadRace:
    """One builder and the oracle beside it; what went wrong is counted on the device.

    ``fault``: "left out" replays steps ahead without saying so to the device; "too many" replays one more and takes it
    for the next step. Both must be found out.
    """

    def __init__(self, device, transport, depth, seed, fault=""):
        self.rng, self.device, self.cuda, self.fault = np.random.default_rng(seed), device, device != "cpu", fault
        self.batch = InputBatch(max_num_reqs=ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        # All that is compared is declared: of other fields a replay too many sees the last step's values.
        backend = Backend(device, needs=NAMES)
        self.builder = builder_of(self.batch, backend, transport, depth, ticket=False)
        self.by_nodes = self.builder.transport == "graph"  # with ``copy`` a replay too many runs the last step again
        side = builder_insides.side(self.builder)
        pages = side.page_buffer(0)
        self.models = {size: Model(self.builder.capture(size), pages, device) for size in BUCKETS}
        self.requests = Requests(self.rng)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.first_wrong = torch.full((), -1, device=device)
        self.done, self.most = 0, ROWS // 2
        self.kinds = dict.fromkeys(("ahead", "stopped", "rolled back", "prefill", "eager", "graph", "too many"), 0)
        self.replay_ahead = side.replay_ahead
        if fault == "left out":
            builder_insides.take_longer_way(self.builder)  # one call in C launches without ``replay_ahead``
            side.replay_ahead = self._without_saying_so

    def _without_saying_so(self, step, shape, done, count, graph):
        if done:
            graph.replay()
        else:
            self.replay_ahead(step, shape, done, count, graph)

    def turn(self):
        rng = self.rng
        if rng.random() < 0.01:
            self.most = int(rng.integers(1, ROWS + 1))
        self.requests.churn(self.batch, self.most)
        if self.cuda:
            fall_behind(rng, always=False)
        if rng.random() < 0.35:
            self.built_step()
            return
        running = self.requests.running()
        resting = {name: 0 for name in running if rng.random() < 0.03}
        num_rows, count = len(running) - len(resting), int(rng.integers(1, MOST + 1))
        size = next(size for size in BUCKETS if size >= num_rows)
        self.requests.give_blocks(self.batch, {name: resting.get(name, count) for name in running})
        steps = self.builder.run_ahead(count, bucket=size, scheduled=resting)
        names = steps.first.req_ids
        until = int(rng.integers(0, count + 1)) if rng.random() < 0.2 else count
        self.replay(steps, size, names, resting, until)
        if until < count:
            assert steps.stop() == until
            self.kinds["stopped"] += 1
        elif self.by_nodes and rng.random() < 0.1:
            self.too_many(size, names, resting)
        self.kinds["ahead"] += until
        if until > 1 and names and rng.random() < 0.3:
            back = {name: int(rng.integers(1, until)) for name in names if rng.random() < 0.2}
            self.batch.rollback_many(back)
            for name, tokens in back.items():
                self.requests.computed[self.requests.place[name]] -= tokens
            self.kinds["rolled back"] += bool(back)

    def replay(self, steps, size, names, resting, until):
        model = self.models[size]
        while steps.launched < until:
            left = until - steps.launched
            count = int(self.rng.choice([count for count in COUNTS if count <= left]))
            steps.replay(model.graphs[count], count)
            for step in range(count):
                self.compare(model.seen[step], model.pages[step], names, resting, size)

    def too_many(self, size, names, resting):
        """One more replay by itself: a step without rows, since it has run before the next step is published."""
        self.models[size].graphs[1].replay()
        synchronize()
        if self.fault == "too many":
            before = self.requests.computed.copy()
            self.compare(self.models[size].seen[0], self.models[size].pages[0], names, resting, size)
            self.requests.computed[:] = before
        else:
            self.compare(self.models[size].seen[0], self.models[size].pages[0], (), {}, size)
        self.kinds["too many"] += 1

    def built_step(self):
        rng, requests = self.rng, self.requests
        kind = rng.random()
        query_lens = {}
        if kind < 0.4:
            query_lens = {name: int(rng.integers(2, 40)) for name in requests.running()[-2:]}
        requests.give_blocks(self.batch, query_lens)
        size = next(size for size in BUCKETS if size >= len(requests.running())) if kind > 0.7 else None
        metadata = self.builder.build(query_lens, bucket=size)
        if size:
            metadata.replay(self.models[size].graphs[1])
            self.compare(self.models[size].seen[0], self.models[size].pages[0], metadata.req_ids, {}, size)
        else:
            self.compare(fields_of(metadata), metadata.paged_kv_indices, metadata.req_ids, query_lens, 0)
        self.kinds["graph" if size else "prefill" if query_lens else "eager"] += 1

    def compare(self, seen, pages, names, query_lens, size):
        expected, num_positions = self.requests.expected(names, query_lens, size, size)
        num_rows, num_tokens = len(seen[2]), len(seen[0])
        num_pages = len(expected) - num_positions - num_tokens - 4 * num_rows - 2
        sent = torch.from_numpy(expected)
        sent = sent.pin_memory().to(self.device, non_blocking=True) if self.cuda else sent
        found = [seen[0], seen[1][:num_positions], *seen[2:], pages[:num_pages]]
        bad = (torch.cat([one.long() for one in found]) != sent).any()
        self.first_wrong.copy_(torch.where(bad & (self.first_wrong < 0), self.done, self.first_wrong))
        self.wrong += bad
        self.done += 1


def race(steps, device, transport, depth, seed, fault=""):
    run = AheadRace(device, transport, depth, seed, fault)
    while run.done < steps:
        run.turn()
    return {
        "transport": transport, "depth": depth, "fault": fault, "steps": run.done, "wrong": int(run.wrong),
        "first_wrong": int(run.first_wrong), "kinds": run.kinds | {"preempted": run.requests.preemptions},
    }  # fmt: skip


class Timed:
    """``num_reqs`` decodes with room for ``room`` tokens, and graphs over them of a model of ``nodes`` small nodes."""

    def __init__(self, num_reqs, device, transport, nodes, counts, room=1500):
        self.cuda = device != "cpu"
        width = -(-(2048 + room) // BLOCK_SIZE)
        self.batch = InputBatch(max_num_reqs=num_reqs, max_model_len=width * BLOCK_SIZE, block_size=BLOCK_SIZE)
        self.builder = builder_of(self.batch, Backend(device), transport, 2, ticket=False)
        self.size, self.start = num_reqs, 2000
        for row in range(num_reqs):
            self.batch.add_request(row, range(1 + row * width, 1 + (row + 1) * width), self.start)
        metadata = self.builder.capture(num_reqs)
        work = torch.zeros(1, device=device)

        def model(count):
            for step in range(count):
                metadata.record_next() if step else metadata.record()
                for _ in range(nodes):
                    work.add_(1)

        model(1)
        synchronize()
        self.graphs = {count: captured(lambda count=count: model(count), device) for count in counts}

    def start_again(self):
        self.batch.rollback_many({row: self.batch.num_computed_tokens(row) - self.start for row in self.batch.req_ids})

    def host_ns(self, call, rounds, after):
        """What ``call`` takes the host, from an idle device; ``after`` is not timed."""
        found = []
        for _ in range(rounds):
            self.start_again()
            synchronize()
            start = perf_counter_ns()
            call()
            found.append(perf_counter_ns() - start)
            after()
        synchronize()
        return found[rounds // 10 :]

    def device_us(self, call, rounds):
        """Median of the device's time of what ``call`` launches."""
        if not self.cuda:
            return 0.0
        found = []
        for _ in range(rounds):
            self.start_again()
            synchronize()
            torch.cuda._sleep(400_000)  # so that the host is ahead
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            synchronize()
            found.append(1000 * events[0].elapsed_time(events[1]))
        return statistics.median(found[rounds // 10 :])

    def built(self, steps):
        for _ in range(steps):
            self.builder.build(bucket=self.size).replay(self.graphs[1])

    def ahead(self, steps, count):
        running = self.builder.run_ahead(steps, bucket=self.size)
        for _ in range(steps // count):
            running.replay(self.graphs[count], count)

    def replay_left(self):
        steps = self.builder.steps_ahead
        while steps.left:
            steps.replay(self.graphs[1])


def times(device, transport, rounds):
    found = {}
    for num_reqs in (1, 64, 256):
        timed, kinds = Timed(num_reqs, device, transport, 300, (1, 8)), {}
        for name, call in (
            ("8 builds", lambda timed=timed: timed.built(8)),
            ("run_ahead(8), 8 replays", lambda timed=timed: timed.ahead(8, 1)),
            ("run_ahead(8), one graph", lambda timed=timed: timed.ahead(8, 8)),
            ("run_ahead(8) alone", lambda timed=timed: timed.builder.run_ahead(8, bucket=timed.size)),
        ):
            after = timed.replay_left if name.endswith("alone") else lambda: None
            ns = timed.host_ns(call, rounds, after)
            ns.sort()
            kinds[name] = {
                f"{label}_us_a_step": round(ns[int(part * (len(ns) - 1))] / 8000, 3)
                for label, part in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
            }
        nodes = Timed(num_reqs, device, transport, 0, (1, 65))
        one = nodes.device_us(lambda nodes=nodes: nodes.built(1), rounds)
        many = nodes.device_us(lambda nodes=nodes: nodes.ahead(65, 65), rounds)
        kinds["nodes of a built step, device us"] = round(one, 3)
        kinds["nodes of a step ahead, device us"] = round((many - one) / 64, 3)
        found[f"{num_reqs} decodes"] = kinds
        print(json.dumps({f"{num_reqs} decodes": kinds}, indent=1), flush=True)
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the races, all depths together; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the races")
    parser.add_argument("--rounds", type=int, default=300, help="repetitions of each time; 0: no times")
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu tries the code")
    transports = ("copy",) if args.device == "cpu" else ("graph", "copy")
    result, bad = {"device": args.device, "torch": torch.__version__}, []
    if args.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    races = []
    for transport in transports if args.steps else ():
        steps = args.steps // 3 if transport == transports[0] else args.steps // 30
        races += [race(steps, args.device, transport, depth, seed=args.seed + depth) for depth in (1, 2, 3)]
    bad += [run for run in races if run["wrong"]]
    faults = ("left out", "too many")[: 2 if args.device == "cuda" else 1] if args.steps else ()
    controls = [race(min(args.steps, 3000), args.device, transports[0], 2, 7, fault) for fault in faults]
    bad += [run for run in controls if not run["wrong"]]
    result |= {"races": races, "controls": controls}
    print(json.dumps(result, indent=1), flush=True)
    if args.rounds:
        result["times"] = times(args.device, transports[0], args.rounds)
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(f"wrong: {json.dumps(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
