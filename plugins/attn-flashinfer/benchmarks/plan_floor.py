"""The floor of a plan that the graph makes: a node that only reads its inputs and writes its outputs, beside ours.

    python plugins/attn-flashinfer/benchmarks/plan_floor.py [--sizes 1,8,64,256] [--rounds 60] [--save FILE]

Device time of a node in microseconds, by events around a graph of many; the graphs of all kinds take turns in one
process. *empty* is a kernel that does nothing, *bare* one that reads page pointers and table as the kernel that plans
does, and writes as many words to the same places, with no search and no sums between. *plan* is that kernel, over
random and over equally long contexts, with other numbers of warps, too. Where *bare* misses a goal, no kernel holds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attn_flashinfer import plan_kernel
from device_times import Report, graph_of, times

NODES = 200
WARPS = (1, 2, 4, 8)
_KV_TILE, _REQUEST, _QO_TILE = (tl.constexpr(getattr(plan_kernel, name)) for name in ("KV_TILE", "REQUEST", "QO_TILE"))
_O_INDPTR, _MERGE, _CHUNK = (tl.constexpr(getattr(plan_kernel, name)) for name in ("O_INDPTR", "MERGE_INDPTR", "CHUNK"))
_ROWS, _MASK, _PADDED = (tl.constexpr(getattr(plan_kernel, name)) for name in ("ROWS", "MASK", "PADDED"))


@triton.jit
def _empty(indptr):  # type: ignore[no-untyped-def]
    pass


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _bare(indptr, table, num_rows, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(table)
    words = address.to(tl.pointer_type(tl.int32))
    row = tl.arange(0, rows)
    real = row < num_rows
    pages = tl.load(indptr + row + 1, mask=real, other=0) - tl.load(indptr + row, mask=real, other=0)
    o_indptr, chunk = words + tl.load(table + _O_INDPTR), words + tl.load(table + _CHUNK)
    kv_tiles, requests = words + tl.load(table + _KV_TILE), words + tl.load(table + _REQUEST)
    qo_tile, merge = tl.load(table + _QO_TILE), tl.load(table + _MERGE)
    num_tokens, mask, padded = tl.load(table + _ROWS), tl.load(table + _MASK), tl.load(table + _PADDED).to(tl.int32)
    tl.store(chunk, padded)
    tl.store(words + num_tokens, num_rows, mask=num_tokens >= 0)
    tl.store(o_indptr + 1 + row, pages, mask=real)
    tl.store(words + merge + 1 + row, pages, mask=real & (merge >= 0))
    start = padded * 0
    valid = address.to(tl.pointer_type(tl.uint8)) + mask
    while start < padded:
        entry = start + tl.arange(0, block)
        fits = entry < padded
        tl.store(requests + entry, entry, mask=fits)
        tl.store(kv_tiles + entry, entry, mask=fits)
        tl.store(words + qo_tile + entry, entry, mask=fits & (qo_tile >= 0))
        tl.store(valid + entry, fits.to(tl.uint8), mask=fits & (mask >= 0))
        start += block


def nodes_of(indptr: Any, table: Any) -> dict[str, Callable[[], None]]:
    """What is launched, by name."""
    num_rows = len(indptr) - 1
    rows = max(triton.next_power_of_2(num_rows), 16)

    def bare(warps: int) -> None:
        _bare[(1,)](indptr, table, num_rows, rows=rows, block=512, num_warps=warps)

    def plan(warps: int) -> None:
        plan_kernel._write_plans[(len(table),)](
            indptr, table, num_rows, rows=rows, columns=max(1024 // rows, 1), block=512,
            tried=plan_kernel._TRIED.get(rows, 4), num_warps=warps,
        )  # fmt: skip

    found: dict[str, Callable[[], None]] = {"empty": lambda: _empty[(1,)](indptr)}
    found["plan"] = lambda: plan_kernel.write_plans(indptr, table, num_rows)
    for warps in WARPS:
        found[f"bare, {warps} warps"] = lambda warps=warps: bare(warps)  # type: ignore[misc]
        found[f"plan, {warps} warps"] = lambda warps=warps: plan(warps)  # type: ignore[misc]
    return found


def main(argv: list[str]) -> int:
    from device_plan import Captured, Setting, batch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1,8,64,256", help="decodes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    settings = {
        "tensor cores": Setting(),
        "CUDA cores": Setting(tensor_cores=False),
        "tensor cores, 1 key/value head": Setting(kv_heads=1, group=8),
        "CUDA cores, 1 key/value head, pages of 1": Setting(
            tensor_cores=False, kv_heads=1, group=8, page=1, longest=2048
        ),
    }
    report = Report(args.save)
    for name, setting in settings.items():
        for size in map(int, args.sizes.split(",")):
            row: dict[str, Any] = {"kernel": name, "decodes": size}
            try:
                captured = Captured(setting, size)
            except Exception as error:  # a module that cannot be compiled here is no verdict
                row["not run"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            else:
                row["plans"] = captured.why
                if captured.decode.layout is not None:
                    nodes = nodes_of(captured.indptr, captured.node._table)
                    graphs = {one: graph_of(call, NODES) for one, call in nodes.items()}
                    full = torch.full((size,), captured.most)
                    for kind, pages in (("longest", full), ("random", batch(size, captured.most, 1, 1))):
                        captured.set(pages)
                        row[kind] = times(graphs, NODES, args.rounds)
            report.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
