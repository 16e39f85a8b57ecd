"""One peer, in a process of its own: checks, then times; JSON to the standard output.

    python measure.py vllm_lists FOLDER [ROUNDS]

FOLDER is where the peer's wheel was unpacked. ``make bench-peers`` calls it for each peer.
"""

import importlib
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks")]

import shapes  # noqa: E402
import stubs  # noqa: E402
from timing import interleaved  # noqa: E402

LONG, MIXED = "decode 256, contexts of 8k", "128 decodes + a chunk of 2048"
WITH_GOALS = ("decode 256, contexts 100 to 2000", LONG)


def batches():
    return {
        **{f"decode {n}, contexts 100 to 2000": shapes.decodes(n, (100, 2000), headroom=0) for n in shapes.DECODES},
        LONG: shapes.decodes(256, (8000, 8191), headroom=0),
        MIXED: shapes.mixed(),
    }


def main(peer, folder, rounds=41):
    stubs.install()
    stubs.open_package(folder, whole=peer != "vllm_lists")
    logging.disable(logging.WARNING)
    peer = importlib.import_module(peer)
    result = {"peer": f"vLLM {version('vllm')}", "batches": {}}
    for name, rows in batches().items():
        us = interleaved(peer.ways(rows), int(rounds))
        ratios = {}
        for what, theirs, mine, goal in peer.RATIOS:
            # Other work on the machine lengthens the longer of two the more: the smaller of two ratios counts.
            ratio = min(us[theirs][which] / us[mine][which] for which in ("median", "q1"))
            goal = goal if name in WITH_GOALS else None
            ratios[what] = {"ratio": round(ratio, 1), "goal": goal, "theirs": theirs, "ours": mine}
        result["batches"][name] = {"us": us, "ratios": ratios}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
