"""What ``forward`` adds to the bare library call and the same cache write, and what a step costs the host. On a GPU.

    python forward.py [--generation 2|4] [--save FILE.json]

Both are timed in one run, turn by turn: host time of a call, device time by a captured graph of ten calls. Medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import attncore
from attncore.builder import InputBatch, MetadataBuilder
from attncore.cache_writer import CacheWriter

HEADS, KV_HEADS, SIZE, LONGEST = 32, 8, 128, 4800
SCALE = SIZE**-0.5
KINDS: dict[str, list[tuple[int, int]]] = {
    **{f"decode {count}": [(-1, 1)] * count for count in (1, 64, 256)},
    "prefill 4 x 1024": [(0, 1024)] * 4,
    "chunks 8 x 256": [(-1, 256)] * 8,
    "64 decodes, a chunk of 512": [*[(-1, 1)] * 64, (-1, 512)],
}
"""Requests of (context, tokens); -1: a random context below LONGEST."""


class Case:
    """A step of one kind, on the device, with the layer's tensors and the bare call that it comes to."""

    def __init__(self, backend: Any, kind: str) -> None:
        generator = torch.Generator().manual_seed(len(kind))
        size = backend.config.block_size
        rows = [
            (int(torch.randint(1, LONGEST - tokens, (1,), generator=generator)) if context < 0 else context, tokens)
            for context, tokens in KINDS[kind]
        ]
        blocks = [-(-(context + tokens + 64) // size) for context, tokens in rows]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        self.batch = InputBatch(max_num_reqs=len(rows), max_model_len=8192, block_size=size)
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=8192)
        for index, ((context, _), count) in enumerate(zip(rows, blocks, strict=True)):
            self.batch.add_request(index, [order.pop() for _ in range(count)], context)
        self.cache = backend.allocate_kv_cache(sum(blocks) + 1)
        self.cache.normal_()
        self.metadata = self.builder.build(dict(enumerate(tokens for _, tokens in rows)))
        self.impl = backend.impl("layers.0", scale=SCALE)
        tokens = self.metadata.num_tokens
        self.tensors = [
            torch.randn(tokens, heads, SIZE, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.output = torch.empty_like(self.tensors[0])
        self.bare = self._bare(backend)

    def forward(self) -> Any:
        return self.impl.forward(*self.tensors, self.cache, self.metadata)

    def into(self) -> Any:
        return self.impl.forward(*self.tensors, self.cache, self.metadata, self.output)

    def _bare(self, backend: Any) -> Callable[[], Any]:
        """The library's call for such a step and the cache write, on tensors made before."""
        metadata, (query, key, value), library = self.metadata, self.tensors, backend._library
        caches, writer, slots = backend.views(self.cache), CacheWriter(), metadata.slot_mapping
        lengths, sums, starts = metadata.seq_lens, metadata.seq_start_loc, metadata.query_start_loc
        longest, bound = metadata.max_seq_len, metadata.max_query_len
        table = metadata.block_table[:, : -(-longest // backend.config.block_size)]
        fixed: dict[str, Any] = {"softmax_scale": SCALE, "causal": True}
        if bound == 1:
            rows = query.unsqueeze(1)
            if backend.generation == "2":
                kernel, args = library.flash_attn_with_kvcache, (rows, *caches)
                fixed |= {"cache_seqlens": lengths, "block_table": table}
            else:
                kernel, args = library.flash_attn_varlen_func, (rows, *caches)
                fixed |= {"seqused_k": lengths, "page_table": table, "max_seqlen_q": 1, "max_seqlen_k": longest}
        else:
            raw = not metadata.host.context_lens.any()
            kernel, fixed["max_seqlen_q"], fixed["max_seqlen_k"] = library.flash_attn_varlen_func, bound, longest
            args = (query, key, value) if raw else (query, *caches)
            fixed |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts if raw else sums}
            if not raw and backend.generation == "2":
                fixed["block_table"] = table
            elif not raw:
                del fixed["cu_seqlens_k"]
                fixed |= {"seqused_k": lengths, "page_table": table}

        def call() -> Any:
            writer(key, value, *caches, slots)
            return kernel(*args, **fixed)

        return call


def host_times(calls: dict[str, Callable[[], Any]], turns: int = 12, each: int = 25) -> dict[str, float]:
    """Median microseconds of a call on the host, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            torch.cuda.synchronize()
            call()
            for _ in range(each):
                start = perf_counter()
                call()
                found[name].append(perf_counter() - start)
    torch.cuda.synchronize()
    return {name: 1e6 * statistics.median(times) for name, times in found.items()}


def device_times(calls: dict[str, Callable[[], Any]], turns: int = 15) -> dict[str, float]:
    """Median microseconds of a call on the device: of a graph of ten, turn by turn."""
    graphs = {name: captured(call, 10) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 100)
    return {name: statistics.median(times) for name, times in found.items()}


def captured(call: Callable[[], Any], count: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
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


def replays(backend: Any, counts: tuple[int, ...] = (1, 8, 32, 64, 128, 256)) -> dict[str, dict[str, float]]:
    """A step of decodes of one layer through its graph: build and replay on the host, and until it is done."""
    found = {}
    size = backend.config.block_size
    impl = backend.impl("layers.0", scale=SCALE)
    for count in counts:
        batch = InputBatch(max_num_reqs=count, max_model_len=8192, block_size=size)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8192)
        blocks = -(-LONGEST // size) + 1
        cache = backend.allocate_kv_cache(count * blocks + 1)
        generator = torch.Generator().manual_seed(count)
        for index in range(count):
            ids = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
            batch.add_request(index, ids, int(torch.randint(1, LONGEST - 500, (1,), generator=generator)))
        tensors = [torch.randn(count, heads, SIZE, device="cuda").bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
        metadata = builder.capture(count)
        impl.forward(*tensors, cache, metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        with torch.cuda.graph(graph):
            metadata.record()
            impl.forward(*tensors, cache, metadata)
        gc.enable()
        eager: list[float] = []
        for _ in range(60):
            start = perf_counter()
            builder.build()
            eager.append(perf_counter() - start)
            torch.cuda.synchronize()
        built, launched, done = [], [], []
        for _ in range(150):
            torch.cuda.synchronize()
            start = perf_counter()
            step = builder.build(bucket=count)
            middle = perf_counter()
            step.replay(graph)
            sent = perf_counter()
            torch.cuda.synchronize()
            built.append(middle - start)
            launched.append(sent - middle)
            done.append(perf_counter() - start)
        names = {"eager build and commit": eager, "build": built, "replay": launched, "until done": done}
        found[f"decode {count}"] = {name: round(1e6 * statistics.median(times), 2) for name, times in names.items()}
        del graph, metadata
        builder.release(count)
        builder.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", choices=("2", "4"), default="2")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    choice = attncore.select(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="bfloat16", backend="flash",
        options={"flash": {"generation": args.generation}},
    )  # fmt: skip
    backend: Any = choice.create()
    found: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "date": date.today().isoformat(),
        },
        "library": backend.record.library,
        "block_size": backend.config.block_size,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "dtype": "bfloat16", "longest": LONGEST},
        "forward": {},
    }
    with torch.inference_mode():
        for kind in KINDS:
            case = Case(backend, kind)
            found_there, bare = case.forward(), case.bare()
            bare = bare[0] if isinstance(bare, tuple) else bare
            error = (found_there.float() - bare.float().view_as(found_there)).abs().max().item()
            calls = {"bare": case.bare, "forward": case.forward, "into output": case.into}
            host, device = host_times(calls), device_times(calls)
            found["forward"][kind] = {
                "host_us": {name: round(value, 2) for name, value in host.items()},
                "added_us": round(host["forward"] - host["bare"], 2),
                "device_us": {name: round(value, 2) for name, value in device.items()},
                "ratio": round(device["forward"] / device["bare"], 4),
                "largest_difference": error,
            }
            print(kind, json.dumps(found["forward"][kind]), flush=True)
            del case
        found["replay_us"] = replays(backend)
    for count, times in found["replay_us"].items():
        print(count, json.dumps(times))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
