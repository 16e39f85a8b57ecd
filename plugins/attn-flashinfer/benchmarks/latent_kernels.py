"""Latent attention (MLA) by FlashAttention 3 beside FlashInfer: bare calls, device time, by turns; medians.

    python plugins/attn-flash/benchmarks/latent.py [--save FILE]

Rows of 576, of which 512 are the values, bfloat16, pages of 64. FlashAttention 3 takes the rotated 64 columns as keys,
the others as values, and their part of the queries as ``q_v``. A row of the report is one setting of query heads,
requests, tokens of each and context; microseconds of one call in a CUDA graph. Needs vLLM's wheel, for its kernels, and
flashinfer-python.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attn_flash.generation3_vllm import load

ROW, VALUES, PAGE, CALLS, ROUNDS, WARM_UP = 576, 512, 64, 4, 20, 5
SCALE = 192**-0.5
SETTINGS = [
    (heads, requests, tokens, context)
    for heads in (16, 128)
    for requests, tokens, context in (
        (1, 1, 4096), (8, 1, 4096), (64, 1, 1024), (64, 1, 4096), (64, 4, 4096), (1, 2048, 0), (1, 2048, 8192)
    )
]  # fmt: skip


class Step:
    """Requests of ``tokens`` queries behind ``context`` keys, over pages in any order."""

    def __init__(self, heads: int, requests: int, tokens: int, context: int) -> None:
        pages = -(-(context + tokens) // PAGE)
        on_device: Any = {"device": "cuda"}
        self.cache = torch.randn(requests * pages + 1, PAGE, ROW, dtype=torch.bfloat16, **on_device)
        self.table = (torch.randperm(requests * pages, **on_device) + 1).view(requests, pages).int()
        self.lens = torch.full((requests,), context + tokens, dtype=torch.int32, **on_device)
        self.starts = torch.arange(requests + 1, dtype=torch.int32, **on_device) * tokens
        self.query = torch.randn(requests * tokens, heads, ROW, dtype=torch.bfloat16, **on_device)
        self.heads, self.tokens, self.longest, self.pages = heads, tokens, context + tokens, pages

    def flash(self) -> Callable[[], Any]:
        library = load()
        rows = self.cache.unsqueeze(2)
        keys, values = rows[..., VALUES:], rows[..., :VALUES]
        content, rotated = self.query[..., :VALUES], self.query[..., VALUES:]
        nothing = [None] * 8
        rest = (
            keys, values, None, None, content, None, self.starts, None, None, None, self.lens, self.tokens,
            self.longest, self.table, *nothing, SCALE, self.tokens > 1, -1, -1, *library.before_cap, 0.0, True, None,
            0, None, 0, *library.last(None),
        )  # fmt: skip
        return lambda: library.forward(rotated, *rest)[0]

    def flashinfer(self, kernels: str) -> Callable[[], Any]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

        space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(space, backend=kernels)
        indptr = torch.arange(len(self.lens) + 1, dtype=torch.int32) * self.pages
        rows = MLAPlanMetadata.csr(self.starts.cpu(), indptr, self.table.flatten(), self.lens.cpu())
        wrapper.plan(
            metadata=rows, num_heads=self.heads, head_dim_ckv=VALUES, head_dim_kpe=ROW - VALUES, page_size=PAGE,
            causal=self.tokens > 1, sm_scale=SCALE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        output = self.query.new_empty(*self.query.shape[:2], VALUES)
        return lambda: wrapper.run(query=self.query, kv_cache=self.cache, out=output)


def measured(step: Step) -> dict[str, Any]:
    """Medians of the calls that run, and why others do not."""
    calls: dict[str, Callable[[], Any]] = {}
    graphs, row, expected = {}, {}, None
    makers = {"fa3": lambda: step.flashinfer("fa3"), "fa2": lambda: step.flashinfer("fa2"), "flash": step.flash}
    for name, make in makers.items():
        try:
            call = calls[name] = make()
            found = call()
            found = found[0] if isinstance(found, tuple) else found
            expected = found.float() if expected is None else expected
            torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            gc.disable()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    call()
            gc.enable()
            graphs[name] = graph
        except Exception as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(ROUNDS + WARM_UP):
        for name, graph in graphs.items():
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            if index >= WARM_UP:
                taken[name].append(first.elapsed_time(last) * 1000 / CALLS)
    return {name: round(statistics.median(one), 2) for name, one in taken.items()} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for heads, requests, tokens, context in SETTINGS:
        step = Step(heads, requests, tokens, context)
        asked = {"heads": heads, "requests": requests, "tokens": tokens, "context": context}
        rows.append(asked | measured(step))
        print(json.dumps(rows[-1]), flush=True)
        if args.save:
            said = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
            args.save.write_text(json.dumps(said, indent=1) + "\n")
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
