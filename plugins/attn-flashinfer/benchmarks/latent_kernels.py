"""Latent attention (MLA) by FlashAttention 3 beside FlashInfer: bare calls, device time, by turns; medians.

    python plugins/attn-flashinfer/benchmarks/latent_kernels.py [--save FILE]

Rows of 576, of which 512 are the values, bfloat16, pages of 64. FlashAttention 3 takes the rotated 64 columns as keys,
the others as values, and their part of the queries as ``q_v``. A row of the report is one setting of query heads,
requests, tokens of each and context; microseconds of one call in a CUDA graph: ``flash`` is FlashAttention 3 of vLLM's
wheel, by the plugin attn-flash, ``fa3`` and ``fa2`` are FlashInfer's kernels of these names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attn_flash.generation3_vllm import load
from attn_flashinfer import modules
from device_times import Report, compared

ROW, VALUES, PAGE, CALLS, ROUNDS = 576, 512, 64, 4, 20
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    report = Report(args.save, cuda=str(torch.version.cuda), flashinfer=modules.version())
    for heads, requests, tokens, context in SETTINGS:
        asked = {"heads": heads, "requests": requests, "tokens": tokens, "context": context}
        step = Step(heads, requests, tokens, context)
        fa3, fa2 = (partial(step.flashinfer, kernels) for kernels in ("fa3", "fa2"))
        report.add(asked | compared({"fa3": fa3, "fa2": fa2, "flash": step.flash}, CALLS, ROUNDS))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
