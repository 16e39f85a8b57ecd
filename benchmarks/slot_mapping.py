"""``attncore.slots.compute_slot_mapping`` beside loops over tokens in Python, microseconds for one sequence.

    python benchmarks/slot_mapping.py [--json FILE]

*loop*: a function with the same arguments that does the same without checks, as the first generation of engines had it.
*bare loop*: nothing but a slot for each token, of a table that is at hand. All append to a new list. They take turns,
and the medians of the turns are printed: of a decode, of chunks, and of a prompt, with a table that is a list or an
int32 array, and in a profiling run, which has no slots.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from attncore.slots import PAD_SLOT_ID, compute_slot_mapping

BLOCK, CONTEXT = 16, 8191  # two tokens lie in two blocks
TOKENS = (1, 2, 16, 512, 8192)
KINDS = ("list", "int32", "profiling run")


def bare_loop(slots, context_len, seq_len, block_size, block_table):
    for i in range(context_len, seq_len):
        slots.append(block_table[i // block_size] * block_size + i % block_size)


def loop(is_profile_run, slot_mapping, seq_id, seq_len, context_len, start_idx, block_size, block_tables):
    if is_profile_run:
        slot_mapping.extend([PAD_SLOT_ID] * (seq_len - context_len))
        return
    first = max(start_idx, context_len)
    slot_mapping.extend([PAD_SLOT_ID] * (first - context_len))
    bare_loop(slot_mapping, first, seq_len, block_size, block_tables[seq_id])


def microseconds(tokens, turns, kind="list"):
    """Medians by name for the last ``tokens`` of a sequence with ``CONTEXT`` before them."""
    stop, profiling = CONTEXT + tokens, kind == "profiling run"
    table = [(7 * block) % 60000 for block in range(-(-stop // BLOCK))]
    table = np.array(table, np.int32) if kind == "int32" else table
    rest = 5, stop, CONTEXT, 0, BLOCK, {5: table}
    calls = {
        "bare loop": lambda slots: bare_loop(slots, CONTEXT, stop, BLOCK, table),
        "loop": lambda slots: loop(profiling, slots, *rest),
        "compute_slot_mapping": lambda slots: compute_slot_mapping(profiling, slots, *rest),
        "nothing": lambda slots: None,
    }
    if profiling:
        del calls["bare loop"]
    repeats, clock = max(1, 200 // tokens), time.perf_counter
    found = {name: [] for name in calls}
    for _ in range(turns):
        results = []
        for name, call in calls.items():
            lists = [[] for _ in range(repeats)]
            start = clock()
            for slots in lists:
                call(slots)
            found[name].append((clock() - start) / repeats * 1e6)
            results.append(lists[0])
        if any(result != results[0] for result in results[:-1]):
            raise RuntimeError(f"{tokens} tokens: the slots differ")
    medians = {name: statistics.median(times) for name, times in found.items()}
    nothing = medians.pop("nothing")
    return {name: median - nothing for name, median in medians.items()}


def processor():
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=1001)
    parser.add_argument("--json", help="a file to write the medians to")
    asked = parser.parse_args(argv)
    print(f"{processor()}, Python {platform.python_version()}, blocks of {BLOCK}: median us of {asked.turns} turns")
    found = {}
    for kind in KINDS:
        found[kind] = {tokens: microseconds(tokens, asked.turns, kind) for tokens in TOKENS}
        for tokens, row in found[kind].items():
            print(f"  {kind}, {tokens} tokens: " + ", ".join(f"{name} {us:.2f}" for name, us in row.items()))
    if asked.json:
        about = {"where": processor(), "python": platform.python_version(), "turns": asked.turns, "us": found}
        Path(asked.json).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
