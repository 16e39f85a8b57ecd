"""Is the tail of a served step the machine's? A loop without attncore takes turns with served_step's stand-in engine.

    python benchmarks/tail_floor.py [--rows 256] [--backends flash] [--steps 1000] [--save FILE]

Steps of benchmarks/served_loop.py (everybody decodes) and of *bare* loops run one after the other, over the same device
and the same time of the model. A bare step has the same Python bookkeeping; instead of attncore's build it advances the
lengths of all rows in NumPy and writes positions, slots, page pointers and a copy of the new blocks to pinned memory
("arrays"), runs a loop of Python that touches no memory for about as long ("spin"), and replays a graph. Each part has
median, p90 and p99 in microseconds, and how many times the median the p99 is. Where parts without attncore have the
same tails, they are the machine's. ``frozen`` runs: behind ``gc.freeze()`` and without Python's collector, as some
engines run.

``--device cpu --steps 20`` tries the code.
"""

import argparse
import gc
import json
import random
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import served_step
import torch
from builder_insides import wrap_parts
from gpu import machine
from nodes_on_host import nodes_on_host
from parts import Parts
from served_loop import Loop

OURS = served_step.OF_ATTNCORE


class Bare:
    """Decodes of ``rows`` requests without attncore: arrays that are advanced, a graph that takes as long."""

    def __init__(self, rows, block_size, device, parts, context, steps):
        self.parts, self.device, self.block_size = parts, device, block_size
        width = -(-(context + steps) // block_size) + 1
        pinned = device.name == "cuda"
        arena = [torch.zeros(rows + 1, dtype=torch.int64, pin_memory=pinned) for _ in range(4)]
        self.positions, self.slots, self.indptr, self.new = (one.numpy()[:rows] for one in arena)
        self.held = arena
        self.rows, self.table = np.arange(rows), np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        self.lengths = context - np.random.default_rng(0).integers(0, 256, rows)
        self.tokens = {name: [5] * int(length) for name, length in enumerate(self.lengths)}
        self.ids = torch.ones(rows, dtype=torch.int64, device=device.name)
        self._model()
        self.graph = served_step.graph_of(self._captured, device)
        self.launch = parts.around(partial(device.launch, self.graph.replay), "launch")
        self.spins = self._spins()

    def _model(self):
        self.device.spin()
        return self.ids % 31999 + 1

    def _captured(self):
        self.sampled = self._model()

    @staticmethod
    def _spins(nanoseconds=10_000):
        start = perf_counter_ns()
        for _ in range(100_000):
            pass
        return int(nanoseconds * 100_000 / (perf_counter_ns() - start))

    def _arrays(self):
        np.copyto(self.positions, self.lengths)
        self.lengths += 1
        page = self.positions // self.block_size
        self.slots[:] = self.table[self.rows, page] * self.block_size + self.positions % self.block_size
        np.cumsum(page + 1, out=self.indptr)
        starts = self.positions % self.block_size == 0
        self.new[: starts.sum()] = self.table[self.rows[starts], page[starts]]

    def step(self):
        parts = self.parts
        with parts.part("schedule"):
            scheduled = dict.fromkeys(self.tokens, 1)
            for name, count in scheduled.items():
                tokens = self.tokens[name]
                tokens += [5] * (count - 1)
        with parts.part("arrays"):
            self._arrays()
        with parts.part("spin"):
            for _ in range(self.spins):
                pass
        self.launch()
        with parts.part("wait"):
            sampled = self.device.tokens(self.sampled)
        with parts.part("book"):
            for name, token in zip(scheduled, sampled, strict=True):
                self.tokens[name].append(token)


def engine(rows, name, args, device, parts):
    """served_step's stand-in, with its clocks."""
    with nodes_on_host(parts.around) if args.device == "cpu" else nullcontext():
        loop = Loop("decode", rows, served_step.backend_of(name, args), device, parts, args, served_step.graph_of)
    wrap_parts(loop.builder, parts.around)
    loop.builder.build = parts.around(loop.builder.build, "build")
    return loop


def with_ratio(found):
    return found | {"p99_over_median": round(found["p99"] / found["median"], 2) if found["median"] else None}


def measured(rows, name, args, frozen):
    device, ours, bare = served_step.Device(args), Parts(), Parts()
    loop = engine(rows, name, args, device, ours)
    other = Bare(rows, loop.block_size, device, bare, args.context, 2 * args.steps + 200)
    if frozen:
        gc.collect()
        gc.freeze()
        gc.disable()
    collections = [one["collections"] for one in gc.get_stats()]
    try:
        for index in range(args.steps + served_step.WARM_UP):
            loop.step()
            other.step()
            if index < served_step.WARM_UP:
                ours.clear()
                bare.clear()
            else:
                ours.end_step()
                bare.end_step()
    finally:
        if frozen:
            gc.enable()
            gc.unfreeze()
    row = {
        "rows": rows, "backend": name, "frozen": frozen, "steps": args.steps, "transport": loop.builder.transport,
        "collections": [now["collections"] - then for now, then in zip(gc.get_stats(), collections, strict=True)],
        "attncore": with_ratio(ours.sums(OURS)),
        "bare: arrays and spin": with_ratio(bare.sums(("arrays", "spin"))),
        "parts": {part: with_ratio(found) for part, found in ours.table().items()},
        "bare parts": {part: with_ratio(found) for part, found in bare.table().items()},
    }  # fmt: skip
    loop.close()
    return row


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--rows", default="256")
    add("--backends", default="flash")
    add("--steps", type=int, default=1000)
    add("--device-ms", type=float, default=3.0, help="how long the model runs")
    add("--context", type=int, default=2048)
    add("--save", type=Path, help="the result file, JSON")
    given = parser.parse_args(argv)
    args = served_step.arguments(["--device", given.device, "--steps", str(given.steps)])
    args.device_ms, args.context = given.device_ms, given.context
    if args.device == "cpu":
        torch.set_num_threads(1)
    found = {"machine": machine(), "rows": []}
    for name in given.backends.split(","):
        for rows in map(int, given.rows.split(",")):
            for frozen in (False, True):
                random.seed(0)
                row = measured(rows, name, args, frozen)
                found["rows"].append(row)
                print(json.dumps(row, indent=1), flush=True)
                if given.save:
                    given.save.parent.mkdir(parents=True, exist_ok=True)
                    given.save.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
