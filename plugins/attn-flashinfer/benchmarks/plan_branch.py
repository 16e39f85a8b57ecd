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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_times import Report, graph_of, times

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

    return {one.__name__: graph_of(one, UNITS) for one in (line, branch, none)}


def main(argv: list[str]) -> int:
    from device_plan import Captured, Setting, batch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1,64,256", help="decodes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    report = Report(args.save)
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

            found = times(graphs_of(captured.node, layer, captured.run), UNITS, args.rounds)
            row = {"decodes": size, "hidden": hidden, "us": found}
            row["plan in line"] = round(found["line"] - found["none"], 2)
            row["plan on a branch"] = round(found["branch"] - found["none"], 2)
            report.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
