"""Decodes over an fp8 cache beside the same over one in bfloat16: the device's time of a layer, cache write included.

    python fp8_decode.py [--backends flash,flashinfer] [--contexts 1024,8192] [--rows 16,64] [--save FILE.json]

A captured graph of ten calls, the dtypes by turns, medians. Bytes: of the keys and values that a call has to read. On a
GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from forward import captured

import attncore
from attncore.builder import InputBatch, MetadataBuilder

HEADS, KV_HEADS, SIZE = 32, 8, 128
DTYPES = ("auto", "fp8_e4m3")


def graph_of(name: str, kv_cache_dtype: str, rows: int, context: int) -> tuple[Any, Any, Any]:
    """A graph of ten calls of a layer, what it was chosen as, and what has to outlive it."""
    choice = attncore.select(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
        backend=name,
    )  # fmt: skip
    backend: Any = choice.create()
    size = backend.config.block_size
    blocks = -(-(context + 1) // size)
    order = (torch.randperm(rows * blocks) + 1).tolist()
    batch = InputBatch(max_num_reqs=rows, max_model_len=(blocks + 1) * size, block_size=size)
    for row in range(rows):
        batch.add_request(row, [order.pop() for _ in range(blocks)], context)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=rows)
    cache = backend.allocate_kv_cache(rows * blocks + 1)
    impl = backend.impl("layers.0", scale=SIZE**-0.5)
    tensors = [torch.randn(rows, heads, SIZE, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    metadata = builder.build(dict.fromkeys(range(rows), 1))
    impl.forward(*tensors, cache, metadata)
    graph = captured(lambda: impl.forward(*tensors, cache, metadata), 10)
    return graph, choice, (builder, cache, impl, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="flash,flashinfer")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    found: dict[str, Any] = {"machine": machine, "shape": [HEADS, KV_HEADS, SIZE], "decodes": []}
    with torch.inference_mode():
        for name in args.backends.split(","):
            for context in map(int, args.contexts.split(",")):
                for rows in map(int, args.rows.split(",")):
                    made = {dtype: graph_of(name, dtype, rows, context) for dtype in DTYPES}
                    times: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
                    for _ in range(25):
                        for dtype, (graph, *_) in made.items():
                            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                            begin.record()
                            graph.replay()
                            end.record()
                            end.synchronize()
                            times[dtype].append(begin.elapsed_time(end) * 100)
                    medians = {dtype: statistics.median(values[3:]) for dtype, values in times.items()}
                    row = {
                        "backend": name, "variants": [made[dtype][1].variant for dtype in DTYPES], "rows": rows,
                        "context": context, "us": {dtype: round(value, 1) for dtype, value in medians.items()},
                        "ratio": round(medians["auto"] / medians["fp8_e4m3"], 2),
                        "gb_s": {
                            dtype: round(rows * context * KV_HEADS * SIZE * 2 * width / value / 1e3)
                            for (dtype, value), width in zip(medians.items(), (2, 1), strict=True)
                        },
                    }  # fmt: skip
                    found["decodes"].append(row)
                    print(json.dumps(row), flush=True)
                    del made
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
