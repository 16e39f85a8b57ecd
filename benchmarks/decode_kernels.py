"""Each kernel of decodes at each size, over caches in the model's dtype and in fp8: which one is to be chosen?

    python benchmarks/decode_kernels.py [--kernels flash,flashinfer:tensor_cores,...] [--rows 1,8,64] [--sinks]
                                        [--block 16] [--save FILE]

A kernel is a backend, with the value of its option ``decode`` behind a colon; with ``--sinks`` each runs with sinks,
too, beside itself without. The device's time of a layer's captured decode, cache write included: a graph of ten calls,
the kernels by turns in one process, medians. Plans on the host are outside of it. ``--device cpu --tiny`` tries the
code without a GPU; its figures mean nothing.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter_ns

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu import machine
from gpu_work import captured, synchronize

import attncore
from attncore import InputBatch, MetadataBuilder

HEADS, KV_HEADS, SIZE = 32, 8, 128
CALLS = 10


class Decode:
    """A graph of ten calls of a layer, over ``rows`` requests of ``context`` tokens in blocks of ``block``."""

    def __init__(self, kernel, kv_cache_dtype, rows, context, device, sinks=False, *, block=16):
        name, _, asked = kernel.partition(":")
        choice = attncore.select(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
            backend=name, block_size=block, options={name: {"decode": asked}} if asked else {}, sinks=sinks,
        )  # fmt: skip
        backend = choice.create(device=device)
        self.variant = choice.variant
        blocks = -(-(context + 1) // block)
        order = (torch.randperm(rows * blocks) + 1).tolist()
        batch = InputBatch(max_num_reqs=rows, max_model_len=(blocks + 1) * block, block_size=block)
        for row in range(rows):
            batch.add_request(row, [order.pop() for _ in range(blocks)], context)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=rows)
        cache = backend.allocate_kv_cache(rows * blocks + 1)
        impl = backend.impl("layers.0", scale=SIZE**-0.5, **({"sinks": [0.5] * HEADS} if sinks else {}))
        tensors = [torch.randn(rows, heads, SIZE, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
        metadata = builder.build(dict.fromkeys(range(rows), 1))

        def calls():
            for _ in range(CALLS):
                impl.forward(*tensors, cache, metadata)

        calls()  # what is compiled at first use is so before the capture
        synchronize()
        self.graph = captured(calls, device)
        self._kept = builder, cache, tensors

    def microseconds(self, device):
        """Of a call, by one replay."""
        if device == "cpu":
            start = perf_counter_ns()
            self.graph.replay()
            return (perf_counter_ns() - start) / 1e3 / CALLS
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS


def measured(args, rows, context):
    """A row of the results: medians by kernel and dtype of the cache, microseconds."""
    decodes, refused = {}, {}
    kinds = itertools.product(
        args.dtypes.split(","), args.kernels.split(","), (False, True) if args.sinks else (False,)
    )
    for dtype, kernel, sinks in kinds:
        name = f"{kernel}, {dtype}" + ", sinks" * sinks
        try:
            decodes[name] = Decode(kernel, dtype, rows, context, args.device, sinks, block=args.block)
        except attncore.NoBackendError as error:
            refused[name] = str(error).splitlines()[-1].strip()
    times = {name: [] for name in decodes}
    for _ in range(3 if args.tiny else 20):
        for name, decode in decodes.items():
            times[name].append(decode.microseconds(args.device))
    us = {name: round(statistics.median(found[1:]), 1) for name, found in times.items()}
    variants = {name: decode.variant for name, decode in decodes.items()}
    return {"rows": rows, "context": context, "us": us, "variants": variants, "refused": refused}


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true")
    add("--kernels", default="flash,flashinfer:tensor_cores,flashinfer:cuda_cores,flashinfer:xqa")
    add("--dtypes", default="auto,fp8_e4m3", help="of the cache")
    add("--sinks", action="store_true", help="each kernel with sinks, too")
    add("--rows", default="1,8,64,256")
    add("--contexts", default="512,2048,8192")
    add("--block", type=int, default=16, help="tokens of a block")
    add("--save", type=Path)
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the code")
    if args.tiny:
        args.kernels, args.rows, args.contexts = "reference", "1,2", "20"
    return args


def main(words=None):
    args = arguments(words)
    found = {"machine": machine(), "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE}}
    found |= {"block": args.block, "decodes": []}
    with torch.inference_mode():
        for context in map(int, args.contexts.split(",")):
            for rows in map(int, args.rows.split(",")):
                found["decodes"].append(measured(args, rows, context))
                print(json.dumps(found["decodes"][-1]), flush=True)
                gc.collect()
                if args.save:  # after each, so that a time limit costs the rest alone
                    args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
