"""How long the list builder's kernels take to read block tables, beside NumPy that only copies the same arrays.

    python benchmarks/table_reading.py [--json FILE]

256 decodes, tables as lists, int32 and int64 arrays, long ones (1k to 8k tokens in blocks of 16) and short ones (300).
*Copy*: ``numpy.concatenate`` of the int32 arrays into memory that is there: the floor of a reader that has to look at
each table in each step, since its owner may have written to it. All take turns; medians of the turns, microseconds.
"""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import numpy as np

from attncore.builder import Sequence, SequenceGroup
from attncore.kernels import load_kernels

BLOCK, ROWS = 16, 256
KINDS = {"lists": list, "int32": lambda ids: np.array(ids, np.int32), "int64": lambda ids: np.array(ids, np.int64)}


def microseconds(contexts, turns):
    rng = random.Random(0)
    lengths = [rng.randrange(*contexts) for _ in range(ROWS)]
    tables = [[rng.randrange(1, 60_000) for _ in range(length // BLOCK + 1)] for length in lengths]
    arrays = [np.array(ids, np.int32) for ids in tables]
    ids = np.concatenate(arrays)
    calls = {"copy": lambda: np.concatenate(arrays, out=ids)}
    for kernels in ("cython", "numba"):
        for kind, made in KINDS.items():
            rows = zip(lengths, map(made, tables), strict=True)
            groups = [SequenceGroup(False, [Sequence(i, 1, length, table)]) for i, (length, table) in enumerate(rows)]
            reader = load_kernels(kernels).GroupReader()
            if not reader.read(groups) or reader.num_ids != len(ids):
                raise RuntimeError(f"{kernels}, {kind}: not read")
            calls[f"{kernels}, {kind}"] = lambda reader=reader, groups=groups: reader.read(groups)
    found = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(1e6 * (time.perf_counter() - start))
    return {"ids": len(ids), **{name: round(statistics.median(times), 1) for name, times in found.items()}}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    found = {
        name: microseconds(contexts, args.turns) for name, contexts in (("long", (1024, 8192)), ("short", (300, 340)))
    }
    for name, row in found.items():
        print(f"{name}: {', '.join(f'{what} {value}' for what, value in row.items())}")
    if args.json:
        facts = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**facts, "turns": args.turns, "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
