"""Each kernel of decodes at each size, over caches in bfloat16 and in fp8: which one is to be chosen?

    python decode_kernels.py [--rows 1,8,64,256] [--contexts 512,2048,8192] [--head-size 128] [--save FILE.json]

The device's time of a layer's captured decode, cache write included: a graph of ten calls, the kernels by turns in one
process, medians. Plans on the host are outside of it. Needs the modules, or nvcc and ninja. On a GPU.
"""

import argparse
import gc
import json
import statistics
from datetime import date
from pathlib import Path

import torch

import attncore
from attncore.builder import InputBatch, MetadataBuilder

KERNELS = ("tensor_cores", "cuda_cores", "xqa")
HEADS, KV_HEADS, PAGE = 32, 8, 16


def captured(call, count):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
    finally:
        gc.enable()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def made(kernel, kv_cache_dtype, rows, context, size):
    """A graph of ten calls of a layer, and what has to outlive it."""
    choice = attncore.select(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=size, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
        backend="flashinfer", block_size=PAGE, options={"flashinfer": {"decode": kernel}},
    )  # fmt: skip
    backend = choice.create()
    blocks = -(-(context + 1) // PAGE)
    order = (torch.randperm(rows * blocks) + 1).tolist()
    batch = InputBatch(max_num_reqs=rows, max_model_len=(blocks + 1) * PAGE, block_size=PAGE)
    for row in range(rows):
        batch.add_request(row, [order.pop() for _ in range(blocks)], context)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=rows)
    cache = backend.allocate_kv_cache(rows * blocks + 1)
    impl = backend.impl("layers.0", scale=size**-0.5)
    tensors = [torch.randn(rows, heads, size, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    metadata = builder.build(dict.fromkeys(range(rows), 1))
    impl.forward(*tensors, cache, metadata)
    return captured(lambda: impl.forward(*tensors, cache, metadata), 10), (builder, cache, impl, tensors, metadata)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    found = {"machine": machine, "shape": [HEADS, KV_HEADS, args.head_size], "page": PAGE, "decodes": []}
    with torch.inference_mode():
        for context in map(int, args.contexts.split(",")):
            for rows in map(int, args.rows.split(",")):
                graphs = {
                    f"{kernel}, {dtype}": made(kernel, dtype, rows, context, args.head_size)
                    for dtype in ("auto", "fp8_e4m3")
                    for kernel in KERNELS
                }
                times = {name: [] for name in graphs}
                for _ in range(20):
                    for name, (graph, _) in graphs.items():
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        begin.record()
                        graph.replay()
                        end.record()
                        end.synchronize()
                        times[name].append(begin.elapsed_time(end) * 100)
                us = {name: round(statistics.median(values[3:]), 1) for name, values in times.items()}
                found["decodes"].append({"rows": rows, "context": context, "us": us})
                print(json.dumps(found["decodes"][-1]), flush=True)
                del graphs
                gc.collect()
                torch.cuda.empty_cache()
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
