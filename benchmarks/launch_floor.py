"""The floor of steps ahead: what launching the same model costs the host without attncore, in the same process.

    python benchmarks/launch_floor.py [--rows 64,256] [--nodes 1,100,300] [--rounds 300] [--save FILE]

A model of NODES small nodes is captured once a step, and eight steps in one graph: with attncore's nodes (as
``run_ahead`` replays it) and bare. Each round runs every way from an idle device, in another order. *launch* is
``cuGraphLaunch`` of the bare graph by the driver itself, *bare* torch's ``graph.replay()``, *nodes* the same of the
graph that has attncore's nodes, with nothing of attncore on the host; *ahead* is all that ``run_ahead(8)`` and its
replays take. Where *launch* misses the goal no engine can hold it over that model. Microseconds a step.

``--device cpu --rounds 3`` tries the code.
"""

import argparse
import ctypes
import json
import random
import sys
from pathlib import Path
from time import perf_counter_ns

import torch
from gpu import machine
from gpu_ahead import Timed
from gpu_work import captured, synchronize
from parts import of

STEPS = 8


def driver_launch(graph):
    """``cuGraphLaunch`` of a torch graph on the current stream as a call; None where it cannot be had here."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
        handle = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    except (AttributeError, OSError, RuntimeError, TypeError):
        return None
    if call(handle, stream):
        return None
    return lambda: call(handle, stream)


class Ways(Timed):
    """``num_reqs`` decodes over a model of ``nodes`` nodes, and the ways to launch eight steps of it."""

    def __init__(self, num_reqs, nodes, args):
        transport = "copy" if args.device == "cpu" else "graph"
        super().__init__(num_reqs, args.device, transport, nodes, (1, STEPS), room=64 * STEPS)
        work = torch.zeros(1, device=args.device)

        def model(count):
            for _ in range(count * nodes):
                work.add_(1)

        model(1)
        synchronize()
        self.bare = {count: captured(lambda count=count: model(count), args.device) for count in (1, STEPS)}
        self.calls = {
            "bare, 1 replay": (1, self.bare[1].replay),
            "bare, 8 replays": (STEPS, lambda: self._each(self.bare[1].replay)),
            "bare, one graph of 8": (STEPS, self.bare[STEPS].replay),
            "ahead, 8 replays": (STEPS, lambda: self.ahead(STEPS, 1)),
            "ahead, one graph of 8": (STEPS, lambda: self.ahead(STEPS, STEPS)),
            "ahead, without launches": (STEPS, lambda: self.builder.run_ahead(STEPS, bucket=self.size)),
            "built, 1 replay": (1, lambda: self.built(1)),
        }
        if self.builder.transport == "graph":  # by themselves they run a step without rows
            self.calls["nodes, 8 replays"] = (STEPS, lambda: self._each(self.graphs[1].replay))
            self.calls["nodes, one graph of 8"] = (STEPS, self.graphs[STEPS].replay)
        if self.cuda and (launch := driver_launch(self.bare[1])) is not None:
            self.calls["launch, 8 times"] = (STEPS, lambda: self._each(launch))
            self.calls["launch, one graph of 8"] = (STEPS, driver_launch(self.bare[STEPS]))

    @staticmethod
    def _each(call):
        for _ in range(STEPS):
            call()

    def times(self, rounds):
        """Median, p90 and p99 of each way, microseconds a step."""
        taken, order = {name: [] for name in self.calls}, list(self.calls)
        for index in range(rounds + rounds // 10 + 1):
            random.shuffle(order)
            for name in order:
                steps, call = self.calls[name]
                self.start_again()
                synchronize()
                start = perf_counter_ns()
                call()
                now = perf_counter_ns() - start
                if name == "ahead, without launches":
                    self.replay_left()
                if index > rounds // 10:
                    taken[name].append(now / steps)
        synchronize()
        return {name: of(ns) for name, ns in taken.items()}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="64,256", help="decodes")
    parser.add_argument("--nodes", default="1,100,300", help="nodes of the model's step")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    found = {"machine": machine(), "steps of a run": STEPS, "rows": []}
    for num_reqs in map(int, args.rows.split(",")):
        for nodes in map(int, args.nodes.split(",")):
            ways = Ways(num_reqs, nodes, args)
            times = ways.times(args.rounds)
            found["rows"].append({"decodes": num_reqs, "nodes": nodes, "us_a_step": times})
            print(f"{num_reqs} decodes, {nodes} nodes a step: median, p90, p99, us a step")
            for name in sorted(times):
                print(f"  {name:26}" + "".join(f"{value:10.2f}" for value in times[name].values()), flush=True)
            if args.save:
                args.save.parent.mkdir(parents=True, exist_ok=True)
                args.save.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
