"""Times the peers, each in a process of its own, saves the run and prints its tables and goals.

    python benchmarks/peers/run.py FOLDER [--rounds 41] [--save RUN.json]
    python benchmarks/peers/run.py --show RUN.json

FOLDER holds a folder a peer, its wheel unpacked, as ``make bench-peers`` lays them out. Exit code 1 where a goal is
missed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = ("vllm_lists", "vllm_step")


def machine():
    """The machine, and nothing that would tell whose it is."""
    from cpuinfo import get_cpu_info

    return {
        "cpu": get_cpu_info().get("brand_raw", platform.machine()), "cores": os.cpu_count(),
        "system": platform.system(), "python": platform.python_version(),
        "numpy": version("numpy"), "torch": version("torch"),
    }  # fmt: skip


def measured(folder, rounds):
    peers = []
    for peer in PEERS:
        words = [sys.executable, str(HERE / "measure.py"), peer, str(folder / peer), str(rounds)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        peers.append(json.loads(done.stdout.splitlines()[-1]))
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "rounds": rounds, "peers": peers}


def show(run):
    """Prints the tables, medians in microseconds; whether every goal holds."""
    good = True
    for peer in run["peers"]:
        for name, batch in peer["batches"].items():
            print(f"\n{peer['peer']}: {name}")
            for way, us in batch["us"].items():
                print(f"  {way:48} {us['median']:>10.2f} us   ({us['q1']:.2f} to {us['q3']:.2f})")
            for what, one in batch["ratios"].items():
                goal, holds = one["goal"], one["goal"] is None or one["ratio"] >= one["goal"]
                said = "" if goal is None else f"goal {goal}x   {'holds' if holds else 'MISSED'}"
                print(f"    {what:48} {one['ratio']:>8.1f}x   {said}")
                good = good and holds
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show:
        return 0 if show(json.loads(options.show.read_text())) else 1
    if options.folder is None:
        parser.error("FOLDER: where the wheels are; make bench-peers unpacks them")
    run = measured(options.folder, options.rounds)
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(run, indent=1) + "\n")
    return 0 if show(run) else 1


if __name__ == "__main__":
    sys.exit(main())
