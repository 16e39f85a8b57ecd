"""Latent attention (MLA) of the plugin beside bare calls of FlashInfer, in the same run, interleaved; medians.

    python plugins/attn-flashinfer/benchmarks/mla.py [--save FILE] [--requests 64] [--context 4096]

bf16 rows of 576 (512 are the values), pages of 64 tokens, decodes of one token. A row of the report is one setting of
query heads, kernels and cache dtype; microseconds:

- ``bare_run``, ``forward_run``: device time of FlashInfer's ``run`` without log-sum-exp, and of ``forward`` without
  writing; ``device_ratio`` is the second over the first (goal: 1.02 at most).
- ``bare_host``, ``forward_host``: host time of the same cache write and bare ``run``, and of ``forward``; ``added`` is
  the difference (goal: below 5).
- ``bare_plan``, ``step``: host time of FlashInfer's ``plan`` and of build, plan and sending of an eager step.
- ``captured_step``: host time of build, plan and replay of a captured size; ``captured_done``: until it is done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attn_flashinfer import modules
from bench import device_us, median_us
from device_times import Report

import attncore
from attncore import CacheWriter
from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import capturing, new_graph

ROW, VALUES, PAGE = 576, 512, 64
SETTINGS = (
    (16, "fa3", "auto"), (16, "fa2", "auto"), (128, "fa3", "auto"), (128, "fa2", "auto"), (16, "fa3", "fp8_e4m3"),
    (128, "fa3", "fp8_e4m3"),
)  # fmt: skip
DTYPE = torch.bfloat16


class Decodes:
    """Requests of one length, which decode a token a step and are set back."""

    def __init__(self, count: int, context: int, heads: int, kernels: str, cache_dtype: str) -> None:
        self.backend: Any = attncore.select(
            num_heads=heads, num_kv_heads=1, head_size=ROW, head_size_v=VALUES, use_mla=True, dtype="bfloat16",
            kv_cache_dtype=cache_dtype, block_size=PAGE, backend="flashinfer",
            options={"flashinfer": {"latent": kernels}},
        ).create()  # fmt: skip
        self.impl = self.backend.impl("layers.0", scale=192**-0.5)
        pages = -(-context // PAGE) + 2
        self.cache = self.backend.allocate_kv_cache(count * pages + 1)
        self.cache.copy_(torch.randn(self.cache.shape, dtype=DTYPE, device="cuda").to(self.cache.dtype))
        self.batch = InputBatch(
            max_num_reqs=count, max_model_len=pages * PAGE, block_size=PAGE, num_blocks=count * pages + 1
        )
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=max(count, 64))
        order = (torch.randperm(count * pages) + 1).tolist()
        for row in range(count):
            self.batch.add_request(row, order[row * pages : (row + 1) * pages], context - 1)
        self.count, self.steps, self.heads = count, 0, heads
        self.query = torch.randn(count, heads, ROW, dtype=DTYPE, device="cuda")
        self.rows = torch.randn(count, 1, ROW, dtype=DTYPE, device="cuda")
        self.output = torch.empty(count, heads, VALUES, dtype=DTYPE, device="cuda")

    def step(self, bucket: int | None = None) -> Any:
        self.steps += 1
        if self.steps % 64 == 0:
            self.batch.rollback_many(dict.fromkeys(range(self.count), 60))
        return self.builder.build(bucket=bucket)

    def forward(self, metadata: Any, write: bool = True) -> Any:
        return self.impl.forward(self.query, self.rows, None, self.cache, metadata, self.output, write=write)


def bare_wrapper(decodes: Decodes, metadata: Any, kernels: str) -> tuple[Any, Any]:
    """FlashInfer's wrapper, planned for a step, and what plans it anew."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    host = metadata.host
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=kernels)
    starts, indptr, lens = (
        torch.from_numpy(array.copy()).pin_memory()
        for array in (host.query_start_loc, host.paged_kv_indptr, host.seq_lens)
    )
    rows = MLAPlanMetadata.csr(starts, indptr, metadata.paged_kv_indices, lens)

    def plan() -> None:
        wrapper.plan(
            metadata=rows, num_heads=decodes.heads, head_dim_ckv=VALUES, head_dim_kpe=ROW - VALUES, page_size=PAGE,
            causal=False, sm_scale=192**-0.5, q_data_type=DTYPE, kv_data_type=decodes.cache.dtype,
        )  # fmt: skip

    plan()
    return wrapper, plan


def measured(count: int, context: int, heads: int, kernels: str, cache_dtype: str) -> dict[str, float]:
    """One setting."""
    decodes = Decodes(count, context, heads, kernels, cache_dtype)
    metadata = decodes.step()
    wrapper, plan = bare_wrapper(decodes, metadata, kernels)
    scales = {} if cache_dtype == "auto" else {"ckv_scale": 1.0, "kpe_scale": 1.0}
    write, keys = CacheWriter(), decodes.cache.unsqueeze(2)
    values, rows = keys[..., :VALUES], decodes.rows[..., :VALUES]
    bare_output = torch.empty_like(decodes.output)

    def bare_run() -> None:
        wrapper.run(query=decodes.query, kv_cache=decodes.cache, out=bare_output, **scales)

    def bare() -> None:
        write(decodes.rows, rows, keys, values, metadata.slot_mapping)
        bare_run()

    decodes.forward(metadata)
    bare_run()
    torch.testing.assert_close(decodes.output, bare_output, atol=2e-2, rtol=2e-2)
    device = device_us(bare_run, lambda: decodes.forward(metadata, write=False))
    host = median_us(bare, lambda: decodes.forward(metadata), rounds=500)
    found = {
        "bare_run": device[0], "forward_run": device[1], "device_ratio": device[1] / device[0],
        "bare_host": host[0], "forward_host": host[1], "added": host[1] - host[0],
    }  # fmt: skip
    found["bare_plan"], found["step"] = median_us(plan, lambda: decodes.step() and None, rounds=60, warm=5)
    return found | captured(decodes)


def captured(decodes: Decodes) -> dict[str, float]:
    """Steps of a captured size."""
    metadata = decodes.builder.capture(decodes.count)
    decodes.forward(metadata)
    torch.cuda.synchronize()
    graph = new_graph("cuda")
    with capturing(graph):
        metadata.record()
        decodes.forward(metadata)
    host, done = [], []
    for _ in range(120):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        decodes.step(decodes.count).replay(graph)
        host.append((time.perf_counter_ns() - start) / 1000)
        torch.cuda.synchronize()
        done.append((time.perf_counter_ns() - start) / 1000)
    return {"captured_step": statistics.median(host[20:]), "captured_done": statistics.median(done[20:])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    report = Report(args.save, cuda=str(torch.version.cuda), flashinfer=modules.version())
    for heads, kernels, cache_dtype in SETTINGS:
        row: dict[str, Any] = {"heads": heads, "kernels": kernels, "cache": cache_dtype}
        row |= {"requests": args.requests, "context": args.context}
        try:
            found = measured(args.requests, args.context, heads, kernels, cache_dtype)
            row |= {name: round(value, 3) for name, value in found.items()}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        report.add(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
