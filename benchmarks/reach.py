"""Prints the table of goals from a saved benchmark run: ratios of medians within that one run.

    python benchmarks/reach.py benchmarks/results/<machine>/<run>.json

Exit code 1 where a goal is missed. ``make bench`` prints the table of the run that it has just made.
"""

import argparse
import json
import sys
from pathlib import Path


def medians(run):
    """(group, way) -> median, microseconds."""
    return {(b["group"], b["extra_info"]["way"]): b["stats"]["median"] * 1e6 for b in run["benchmarks"]}


def engine_rows(run, us):
    """The goals of groups, reorderings and captured sizes; none for a run that was saved before they were timed."""
    if ("reorder 256 three ways", "attncore") not in us:
        return
    for what in ("eight groups", "eight groups, other sizes"):
        ratio = us[f"decode 256 in {what}", "persistent"] / us["decode 256 in one group", "persistent"]
        yield f"decode 256 in {what}", f"{ratio:.2f}x one", "< 4x", ratio < 4
        ratio = us[f"decode 256 in {what}", "numpy"] / us[f"decode 256 in {what}", "persistent"]
        yield "  against eight NumPy passes", f"{ratio:.0f}x", "> 10x", ratio > 10
    value = us["reorder 256 three ways", "attncore"]
    yield "reorder_batch, 256 requests three ways", f"{value:.1f} us", "< 20 us", value < 20
    for b in run["benchmarks"]:
        if b["group"].startswith("graph of") and "lists" not in b["group"]:
            value = b["extra_info"]["added_us"]
            yield f"{b['group']} beyond a plain build", f"{value:.2f} us", "< 1 us", value < 1


def numba_rows(us):
    """The goals of the kernels in numba; none for a run that was saved before they were timed."""
    if ("decode 256", "persistent, numba") not in us:
        return
    for n, goal in ((256, 4), (1, 2)):
        value = us[f"decode {n}", "persistent, numba"]
        yield f"persistent builder on numba, decode {n}", f"{value:.2f} us", f"<= {goal} us", value <= goal
    ratio = us["decode 256 lists", "plain python"] / us["decode 256 lists", "lists common, numba"]
    yield "list builder on numba, decode 256, plain Python", f"{ratio:.1f}x", ">= 5x", ratio >= 5
    value = us["start on numba", "first build"] / 1e6
    yield "a process's first build on numba, warm cache", f"{value:.2f} s", "< 1.5 s", value < 1.5


def rows(run):
    """(what, figure, goal, whether it holds) for every goal."""
    us = medians(run)
    public_api = run["machine_info"].get("reads_ints") == "public C API"
    ratio = us["decode 256", "numpy"] / us["decode 256", "persistent"]
    yield "persistent builder, decode 256, against NumPy", f"{ratio:.1f}x", ">= 20x", ratio >= 20
    for n, goal in ((256, 1.5), (1, 0.3)):
        value = us[f"decode {n}", "persistent"]
        yield f"persistent builder, decode {n}", f"{value:.2f} us", f"< {goal} us", value < goal
    yield from engine_rows(run, us)
    ratio = us["decode 256 lists", "plain python"] / us["decode 256 lists", "lists common"]
    goal = 4 if public_api else 8
    yield "list builder, decode 256, against plain Python", f"{ratio:.1f}x", f">= {goal}x", ratio >= goal
    yield from numba_rows(us)
    ratio = us["prefill 1x8192", "persistent"] / us["prefill 1x8192", "copy"]
    yield "prefill 1x8192, against a copy of the bytes", f"{ratio:.2f}x", "<= 3x", ratio <= 3
    slowest = max(value for (group, _), value in us.items() if group.startswith("attncore build"))
    yield "attncore build, slowest shape", f"{1e6 / slowest:.0f} /s", ">= 2000/s", slowest <= 500
    for what, group, goal in (("attncore list, three plugins", "attncore list", 200), ("select among ten", None, 1)):
        value = us[group or what, "attncore"] / 1000
        yield what, f"{value:.2f} ms", f"< {goal} ms", value < goal
    added = next(b["extra_info"]["added_ms"] for b in run["benchmarks"] if b["group"] == "import")
    yield "import attncore, beside NumPy", f"{added:.1f} ms", "< 10 ms", added < 10
    busy = next(b for b in run["benchmarks"] if b["group"] == "decode 256 beside a busy thread")
    p99 = busy["extra_info"]["p99_us"]
    yield "decode 256 beside a busy thread, p99", f"{p99:.1f} us", "< 50 us", p99 < 50


def show(run):
    """Prints the table; 1 where a goal is missed, else 0."""
    table = list(rows(run))
    for what, figure, goal, holds in table:
        print(f"{what:48} {figure:>10}   goal {goal:<9} {'holds' if holds else 'MISSED'}")
    return 0 if all(holds for *_, holds in table) else 1


def main(words):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN.json")
    try:
        run = json.loads(parser.parse_args(words).run.read_text())
    except (OSError, ValueError) as error:
        print(f"reach: no saved run: {error}", file=sys.stderr)
        return 2
    return show(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
