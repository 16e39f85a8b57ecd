"""What attention costs where a captured size holds any queries: FlashInfer's ragged plan under a graph, beside others.

    python plugins/attn-flashinfer/benchmarks/ragged_tiles.py [--rounds 40] [--save FILE]

Under a graph FlashInfer fixes the tile of queries with the size: for uniform queries by their number of tokens, for
ragged ones by the longest query that the size could hold, all its tokens but one of each other row. *uniform* is what
attn-flashinfer captures today, *ragged* what a size of the level ``always`` would run, *eager* a plan without a graph.
Device time of one layer's attention, microseconds: steps of drafts, and steps of a chunk beside decodes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attn_flashinfer.library import flashinfer
from device_times import Report

HEADS, KV_HEADS, HEAD_SIZE, PAGE, CONTEXT = 32, 8, 128, 16, 2048


class Step:
    """Queries of so many tokens, behind contexts of CONTEXT tokens; ``planned(kind)`` is a call that attends."""

    def __init__(self, queries: Sequence[int]) -> None:
        rows, pages = len(queries), CONTEXT // PAGE
        on_host = {"dtype": torch.int32}
        self.starts = torch.zeros(rows + 1, **on_host)  # type: ignore[call-overload]
        self.starts[1:] = torch.tensor(queries).cumsum(0)
        self.indptr = torch.arange(0, (rows + 1) * pages, pages, **on_host)  # type: ignore[call-overload]
        self.last = torch.full((rows,), PAGE, **on_host)  # type: ignore[call-overload]
        pool = 4096
        self.indices = torch.randint(0, pool, (rows * pages,), dtype=torch.int32, device="cuda")
        self.cache = torch.randn(pool, 2, PAGE, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        self.query = torch.randn(sum(queries), HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        self.queries, self.workspace = queries, torch.empty(512 << 20, dtype=torch.uint8, device="cuda")

    def planned(self, kind: str) -> Any:
        options: dict[str, Any] = {}
        if kind != "eager":
            options = {
                "use_cuda_graph": True, "qo_indptr_buf": self.starts.cuda(), "paged_kv_indptr_buf": self.indptr.cuda(),
                "paged_kv_indices_buf": self.indices, "paged_kv_last_page_len_buf": self.last.cuda(),
            }  # fmt: skip
        wrapper = flashinfer().prefill(self.workspace, "NHD", backend="fa2", **options)
        hint = {"uniform_q_len": self.queries[0]} if kind == "uniform" else {}
        wrapper.plan(
            self.starts, self.indptr, self.indices, self.last, HEADS, KV_HEADS, HEAD_SIZE, PAGE, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, **hint,
        )  # fmt: skip
        out = torch.empty_like(self.query)
        return wrapper, lambda: wrapper.run(self.query, self.cache, out=out), out


def device_us(call: Any, rounds: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for index in range(rounds + 3):
        torch.cuda._sleep(100_000)  # so that the host is ahead
        first.record()
        for _ in range(5):
            call()
        last.record()
        torch.cuda.synchronize()
        if index >= 3:
            taken.append(first.elapsed_time(last) * 200)
    return round(statistics.median(taken), 1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    report = Report(args.save, flashinfer=flashinfer().version)
    for name, queries in {
        "64 rows of 4 tokens": [4] * 64,
        "256 rows of 4 tokens": [4] * 256,
        "64 rows of 8 tokens": [8] * 64,
        "64 decodes and a chunk of 512": [1] * 64 + [512],
        "255 decodes and a chunk of 1024": [1] * 255 + [1024],
    }.items():
        step, row, outputs = Step(queries), {"step": name}, []
        for kind in ("eager", "uniform", "ragged"):
            if kind == "uniform" and len(set(queries)) > 1:
                continue
            wrapper, call, out = step.planned(kind)
            row[f"{kind}, us"] = device_us(call, args.rounds)
            row[f"{kind}, tile"] = int(wrapper._plan_info[3])
            outputs.append(out)
        row["equal to 0.02"] = all(torch.allclose(one.float(), outputs[0].float(), atol=0.02) for one in outputs)
        report.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
