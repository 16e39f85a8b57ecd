"""Does a plan that the graph makes pay on a branch, beside the model's first layers?

    python plugins/attn-flashinfer/benchmarks/plan_branch.py [--sizes 1,64,256] [--rounds 60] [--save FILE]

A graph of twenty units: a first layer up to its attention (a norm, the product with the weights of a query, keys and
values, as wide as in models of 1B to 70B), the plan, and attention over it. *line* has the plan in front of the layer,
as ``metadata.record()`` puts it; *branch* on a second stream that is forked there and joined in front of attention;
*none* has no plan (the last one's stays). Device time of a unit, microseconds, median of rounds that take turns. What
the plan costs a step is *line* or *branch* less *none*: the branch pays where its figure is the smaller one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

UNITS = 20
HIDDEN = (2048, 4096, 8192)
"""Of the models."""


def graphs_of(node: Callable[[], None], layer: Callable[[], None], attend: Callable[[], None]) -> dict[str, Any]:
    """A graph of the units of each kind."""

    def line() -> None:
        node()
        layer()
        attend()

    def branch() -> None:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            node()
        layer()
        main.wait_stream(side)
        attend()

    def none() -> None:
        layer()
        attend()

    return {one.__name__: _captured(one) for one in (line, branch, none)}


def _captured(unit: Callable[[], None]) -> Any:
    unit()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    with torch.cuda.graph(graph):
        for _ in range(UNITS):
            unit()
    gc.enable()
    return graph


def times(graphs: dict[str, Any], rounds: int) -> dict[str, float]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(rounds + 5):
        for name, graph in graphs.items():
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            if index >= 5:
                taken[name].append(first.elapsed_time(last) * 1000 / UNITS)
    return {name: round(statistics.median(one), 2) for name, one in taken.items()}


def main(argv: list[str]) -> int:
    from device_plan import Captured, Setting, batch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1,64,256", help="decodes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for size in map(int, args.sizes.split(",")):
        captured = Captured(Setting(longest=2048), size)
        if captured.decode.layout is None:
            raise SystemExit(f"the device does not plan: {captured.why}")
        captured.set(batch(size, captured.most, 1, 1))
        for hidden in HIDDEN:
            made = {"dtype": torch.bfloat16, "device": "cuda"}
            tokens, weight = torch.randn(size, hidden, **made), torch.randn(hidden, hidden + 2048, **made)
            scale, out = torch.ones(hidden, **made), torch.empty(size, hidden + 2048, **made)

            def layer(tokens: Any = tokens, weight: Any = weight, scale: Any = scale, out: Any = out) -> None:
                normed = torch.nn.functional.rms_norm(tokens, scale.shape, scale)
                torch.mm(normed, weight, out=out)

            found = times(graphs_of(captured.node, layer, captured.run), args.rounds)
            row = {"decodes": size, "hidden": hidden, "us": found}
            row["plan in line"] = round(found["line"] - found["none"], 2)
            row["plan on a branch"] = round(found["branch"] - found["none"], 2)
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.save:
                args.save.parent.mkdir(parents=True, exist_ok=True)
                args.save.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
