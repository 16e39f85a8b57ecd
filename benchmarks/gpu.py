"""Metadata on a CUDA device, measured in one process; prints tables and goals, and saves everything.

    python benchmarks/gpu.py [--race STEPS] [--trace FILE] [--only PART[,PART]] [--save FILE]

Parts: ready (until the device is right), counts (what the driver is asked), pieces (where host time goes), steady
(1,000 steps), bytes (over a trace), race (0 wrong steps), host (build, commit, plan; hot and cold). ``--device cpu``
tries the code without a GPU; its figures mean nothing. Exit code 1 where a goal is missed or a part failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path

import gpu_race
import gpu_trace
import numpy as np
import torch
from gpu_counts import counts, pieces, steady
from gpu_times import host, ready
from gpu_work import transports

from attncore import slots


def machine():
    cpus = [one for one in Path("/proc/cpuinfo").read_text().splitlines() if one.startswith("model name")]
    facts = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "numpy": np.__version__,
        "torch": torch.__version__, "cpu": cpus[0].split(":")[1].strip() if cpus else "", "cores": os.cpu_count(),
        "kernels": slots.load_kernels().IMPLEMENTATION,
    }  # fmt: skip
    if torch.cuda.is_available():
        import triton

        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}
    return facts


def trace_bytes(args):
    """Bytes to the device a step: by context, as the profiler counts copies, and over a trace."""
    transport = transports(args.device)[0]
    found = {"by_context": gpu_trace.by_context(args.device, transport), "trace": []}
    if args.device != "cpu":
        found["by_profiler"] = gpu_trace.copied_bytes(args.device)
    for graph in (True, False) if args.trace else ():
        requests = 200 if args.quick else args.requests
        found["trace"].append(
            gpu_trace.over_trace(args.trace, args.device, transport, graphs=graph, max_requests=requests)
        )
    print(json.dumps(found, indent=1, default=float), flush=True)
    return found


def race(args):
    """Steps at random; nine tenths by graphs, at depths 1 to 3. A control without receipts must go wrong."""
    rows, plans = [], ("per_slot", "shared")
    for transport in transports(args.device):
        steps = args.race if args.device == "cpu" else args.race * 9 // 10 if transport == "graph" else args.race // 10
        for depth in (1, 2, 3):
            for seed, plan in enumerate(plans):
                started = time.perf_counter()
                each = -(-steps // (3 * len(plans)))
                row = gpu_race.race(each, depth, transport, args.device, 100 * depth + seed, plan)
                rows.append(row | {"seconds": round(time.perf_counter() - started, 1)})
                print(rows[-1], flush=True)
        for drops in (0.0, 0.01):
            rows.append(gpu_race.race(-(-args.race // 20), 2, transport, args.device, 8, ticket=True, drops=drops))
            print(rows[-1], flush=True)
        if args.device != "cpu":
            rows.append(control(transport, args.device))
            print(rows[-1], flush=True)
    return rows


def control(transport, device):
    """The race without receipts, in a process of its own: what it reads may lead a kernel to an illegal address."""
    words = f"gpu_race.race(300, 2, {transport!r}, {device!r}, 7, receipts=False)"
    call = f"import gpu_race, json; print(json.dumps({words}))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, env=environ, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "illegal memory access" not in done.stderr:
        raise RuntimeError(f"the control over {transport} failed: {done.stderr[-500:]}")
    return {"transport": transport, "receipts": False, "steps": 300, "wrong": 300, "ended": "illegal memory access"}


# Once torch's profiler has run in a process, each launch there stays dearer by microseconds: what uses it comes last.
PARTS = {
    "ready": ready, "pieces": pieces, "host": host, "steady": steady, "race": race, "bytes": trace_bytes,
    "counts": counts,
}  # fmt: skip


def goals(found):
    """(what, figure, goal, whether it holds) of what was measured; goal "": a figure to know."""
    for context in ("8k", "128k") if "ready" in found else ():
        rows = {one["what"]: one for one in found["ready"] if one["shape"].endswith(f", {context}")}
        if "commit, graph" not in rows:
            break
        for what in ("commit, graph", "build + commit, graph"):
            for other in ("the arrays", "our bytes"):
                ratio = rows[what]["done"] / rows[f"eight pinned copies of {other}"]["done"]
                goal = "< 0.5" if other == "the arrays" else ""
                yield f"ready, {context}: {what}, of eight copies of {other}", f"{ratio:.2f}", goal, ratio < 0.5
        row = rows["commit, graph"]
        told = " / ".join(f"{value:.2f}" for value in row["rounds"])
        yield f"host, {context}: commit, eager (rounds {told})", f"{row['issued']:.2f} us", "< 4 us", row["issued"] < 4
    failed = [row for row in found.get("host", ()) if "failed" in row]
    if "host" in found:
        yield "rows of the host's table that failed", str(len(failed)), "0", not failed
    for row in found.get("counts", ()):
        if row["what"].startswith("graph"):
            made = {name: n for name, n in row["calls"].items() if "IsCapturing" not in name}
            yield f"calls of a step, {row['what']}", json.dumps(made), "one launch", made == {"cudaGraphLaunch": 1.0}
    for row in found.get("pieces", ()):
        value = row["receipt check, arena free"]
        yield f"receipt check, {row['what']}", f"{value:.2f} us", "< 1 us", value < 1
    for row in found.get("bytes", {}).get("trace", ()):
        off = abs(row["total_over_formula"] - 1)
        yield f"bytes over the trace, graphs {row['graphs']}", f"{100 * off:.2f} % off", "< 5 %", off < 0.05
    for row in found.get("bytes", {}).get("by_context", ()):
        yield f"bytes, {row['shape']}", str(row["bytes"]), str(row["formula"]), row["bytes"] == row["formula"]
    for row in found.get("steady", ()):
        still = row["places_of_fields"] == 1 and not any(row["growth"].values())
        yield f"steady, {row['what']}", "still" if still else "moves", "still", still
    kinds = {(False, 0.0): "", (True, 0.0): ", engine replays by itself", (True, 0.01): ", and drops builds"}
    for kind, told in kinds.items():
        rows = [row for row in found.get("race", ()) if row["receipts"] and (row["ticket"], row["drops"]) == kind]
        if rows:
            steps, wrong = (sum(row[name] for row in rows) for name in ("steps", "wrong"))
            what = f"race, {steps} steps{told}"
            yield what, f"{wrong} wrong", "0 wrong", wrong == 0
    for row in found.get("race", ()):
        if not row["receipts"]:
            what = f"control, {row['transport']}, {row['steps']} steps, no arena waited for"
            yield what, f"{row['wrong']} wrong", "some wrong", row["wrong"] > 0


def host_table(rows):
    """The host's times as a table of Markdown: hot / cold microseconds."""
    kinds = list(dict.fromkeys(row["what"] for row in rows))
    cells = {(row["shape"], row["what"]): row for row in rows}
    yield "| | " + " | ".join(kinds) + " |"
    yield "|---" * (len(kinds) + 1) + "|"
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = [cells.get((shape, kind), {}) for kind in kinds]
        yield (
            f"| {shape} | "
            + " | ".join(f"{c['hot']:.1f} / {c['cold']:.1f}" if "hot" in c else "" for c in found)
            + " |"
        )


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--race", type=int, default=2000, metavar="STEPS", help="steps of the race (100000: minutes)")
    parser.add_argument("--trace", type=Path, help="a trace file for the bytes a step")
    parser.add_argument("--requests", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it work?")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is no part")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu tries the code")
    try:
        import flashinfer  # noqa: F401

        args.flashinfer = args.device == "cuda"
    except ImportError:
        args.flashinfer = False
    found, missed = {"machine": machine() | {"flashinfer": args.flashinfer}}, False
    print(found["machine"], flush=True)
    for part in args.only.split(","):
        started = time.perf_counter()
        try:
            found[part] = PARTS[part](args)
        except Exception:
            traceback.print_exc()
            missed = True
        print(f"-- {part}: {time.perf_counter() - started:.1f} s", flush=True)
        if args.save:
            args.save.parent.mkdir(parents=True, exist_ok=True)
            args.save.write_text(json.dumps(found, indent=1, default=float) + "\n")
    print(*host_table(found.get("host", ())), sep="\n")
    for what, figure, goal, holds in goals(found):
        verdict = "" if not goal else "holds" if holds else "MISSED"
        print(f"{what:66} {figure:>14}   {goal:<12} {verdict}")
        missed |= bool(goal) and not holds
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
