"""FlashInfer's decodes that plan nothing beside the one that plans: bare calls, device time, by turns; medians.

    python plugins/attn-flashinfer/benchmarks/planless.py [--save FILE] [--page 16] [--fp8]

bfloat16, 32 query and 8 key/value heads of 128, HND. A row of the report is a number of requests and their context;
microseconds of one call in a CUDA graph: ``planned`` is the wrapper with tensor cores, ``xqa`` and ``cudnn`` read block
tables and lengths on the device. ``--fp8``: in place of cuDNN, the first two over a cache of the same numbers in fp8
(e4m3), too. A call that is not there, or differs from the planned one, has its error in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attn_flashinfer import modules
from device_times import Report, compared

HEADS, KV_HEADS, SIZE, CALLS, ROUNDS = 32, 8, 128, 10, 20
SCALE = SIZE**-0.5
WORKSPACE = 128 << 20


class Step:
    """Decodes of requests with one context, over pages in any order."""

    def __init__(self, requests: int, context: int, page: int) -> None:
        pages = -(-context // page)
        self.requests, self.context, self.page, self.pages = requests, context, page, pages
        shape = requests * pages + 1, 2, KV_HEADS, page, SIZE
        self.fp8 = torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
        self.cache = self.fp8.bfloat16()  # the same numbers
        self.table = (torch.randperm(requests * pages, device="cuda") + 1).view(requests, pages).int()
        self.lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        self.query = torch.randn(requests, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")

    def workspace(self) -> torch.Tensor:
        return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def planned(self, cache: torch.Tensor) -> Callable[[], Any]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        wrapper = BatchDecodeWithPagedKVCacheWrapper(self.workspace(), "HND", use_tensor_cores=True)
        indptr = torch.arange(self.requests + 1, dtype=torch.int32) * self.pages
        last = torch.full((self.requests,), (self.context - 1) % self.page + 1, dtype=torch.int32)
        wrapper.plan(
            indptr, self.table.flatten(), last, HEADS, KV_HEADS, SIZE, self.page, q_data_type=torch.bfloat16,
            kv_data_type=cache.dtype, sm_scale=SCALE,
        )  # fmt: skip
        return lambda: wrapper.run(self.query, cache)

    def xqa(self, cache: torch.Tensor) -> Callable[[], Any]:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        workspace = self.workspace()
        return lambda: trtllm_batch_decode_with_kv_cache(
            self.query, cache, workspace, self.table, self.lens, self.context, bmm1_scale=SCALE, kv_layout="HND"
        )

    def cudnn(self) -> Callable[[], Any]:
        from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache

        keys, values, workspace = self.cache[:, 0], self.cache[:, 1], self.workspace()
        lens = self.lens.view(-1, 1, 1, 1)
        return lambda: cudnn_batch_decode_with_kv_cache(
            self.query, keys, values, SCALE, workspace, max_sequence_kv=self.context, actual_seq_lens_kv=lens,
            block_tables=self.table, is_cuda_graph_compatible=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--fp8", action="store_true")
    args = parser.parse_args()
    report = Report(args.save, cuda=str(torch.version.cuda), flashinfer=modules.version(), page=str(args.page))
    for requests in (1, 8, 64):
        for context in (512, 2048, 8192):
            step = Step(requests, context, args.page)
            calls = {"planned": partial(step.planned, step.cache), "xqa": partial(step.xqa, step.cache)}
            if args.fp8:
                calls |= {"planned_fp8": partial(step.planned, step.fp8), "xqa_fp8": partial(step.xqa, step.fp8)}
            else:
                calls["cudnn"] = step.cudnn
            report.add({"requests": requests, "context": context} | compared(calls, CALLS, ROUNDS))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
