"""Host and device times of the plugin beside bare calls of FlashInfer, in the same run, interleaved; medians.

    python plugins/attn-flashinfer/benchmarks/bench.py [--save FILE]

bf16, 32 query heads over 8, head size 128, pages of 16 tokens, contexts of 512 to 4096 tokens, all drawn anew.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attn_flashinfer import modules

import attncore
from attncore.builder import InputBatch, MetadataBuilder
from attncore.ops.cache_writer import CacheWriter

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
SHORTEST, LONGEST = 512, 4096
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPE = torch.bfloat16


class Engine:
    """A batch of decodes that goes on for ever: lengths grow by a token a step, and are set back."""

    def __init__(self, count: int, options: dict[str, Any] | None = None, heads: int = HEADS, kv_heads: int = KV_HEADS):
        asked = {"options": {"flashinfer": options}} if options else {}
        self.backend: Any = attncore.select(
            num_heads=heads, num_kv_heads=kv_heads, head_size=SIZE, dtype="bfloat16", block_size=PAGE,
            backend="flashinfer", **asked,
        ).create()  # fmt: skip
        self.impl = self.backend.impl("layers.0", scale=SIZE**-0.5)
        rows = LONGEST // PAGE + 8
        blocks = count * rows + 1
        self.cache = self.backend.allocate_kv_cache(blocks)
        self.cache.normal_()
        self.batch = InputBatch(max_num_reqs=count, max_model_len=rows * PAGE, block_size=PAGE, num_blocks=blocks)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=max(count, 64))
        random = np.random.default_rng(count)
        order = random.permutation(np.arange(1, blocks)).tolist()
        self.lengths = random.integers(SHORTEST, LONGEST, count).tolist()
        for row, length in enumerate(self.lengths):
            self.batch.add_request(row, order[row * rows : (row + 1) * rows], length)
        self.count, self.steps = count, 0
        self.query, self.key, self.value = (
            torch.randn(count, number, SIZE, dtype=DTYPE, device="cuda") for number in (heads, kv_heads, kv_heads)
        )

    def step(self, bucket: int | None = None) -> Any:
        self.steps += 1
        if self.steps % 64 == 0:
            self.batch.rollback_many(dict.fromkeys(range(self.count), 60))
        return self.builder.build(bucket=bucket)

    def forward(self, metadata: Any, output: Any = None) -> Any:
        return self.impl.forward(self.query, self.key, self.value, self.cache, metadata, output)


def median_us(*functions: Callable[[], object], rounds: int = 200, warm: int = 20) -> list[float]:
    """Host time of each call, the functions in turn, the device idle before each; what a call returns, where it may be
    called, is called afterwards, and not timed."""
    times: list[list[float]] = [[] for _ in functions]
    gc.disable()
    for index in range(rounds + warm):
        torch.cuda.synchronize()
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter_ns()
            rest = function()
            stop = time.perf_counter_ns()
            if callable(rest):
                rest()
            torch.cuda.synchronize()
            if index >= warm:
                found.append((stop - start) / 1000)
    gc.enable()
    return [statistics.median(found) for found in times]


def device_us(*functions: Callable[[], object], calls: int = 20, rounds: int = 30) -> list[float]:
    """Device time of each call: many of them in a CUDA graph, the graphs in turn, by events."""
    graphs = []
    gc.disable()
    for function in functions:
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                function()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in functions]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(rounds + 3):
        for graph, found in zip(graphs, times, strict=True):
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if index >= 3:
                found.append(start.elapsed_time(stop) * 1000 / calls)
    gc.enable()
    return [statistics.median(found) for found in times]


def pinned(array: Any) -> Any:
    return torch.from_numpy(np.array(array)).pin_memory()


def bare_wrapper(
    engine: Engine, metadata: Any, *, graph: bool, tensor_cores: bool = True
) -> tuple[Any, tuple[Any, ...]]:
    """A wrapper of FlashInfer's own, and the arguments of its plan, for a step."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    host = metadata.host
    indices = metadata.paged_kv_indices
    buffers = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(engine.count + 1, dtype=torch.int32, device="cuda"),
        "paged_kv_indices_buffer": indices,
        "paged_kv_last_page_len_buffer": torch.zeros(engine.count, dtype=torch.int32, device="cuda"),
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=tensor_cores, backend="fa2",
        **(buffers if graph else {}),
    )  # fmt: skip
    config = engine.backend.config
    arguments = (
        pinned(host.paged_kv_indptr), indices[:0] if graph else indices, pinned(host.paged_kv_last_page_len),
        config.num_heads, config.num_kv_heads, SIZE, PAGE,
    )  # fmt: skip
    return wrapper, arguments


KEYWORDS = {"sm_scale": SIZE**-0.5, "q_data_type": DTYPE, "kv_data_type": DTYPE, "o_data_type": DTYPE}


def plans(count: int) -> dict[str, float]:
    """Build, commit and plan of an eager step and of a captured size, beside the bare plans."""
    from flashinfer.decode import fast_decode_plan

    engine = Engine(count)
    metadata = engine.step()
    eager, arguments = bare_wrapper(engine, metadata, graph=False)
    captured, captured_arguments = bare_wrapper(engine, metadata, graph=True)
    graph = layer_graph(engine)
    captured.plan(*captured_arguments, **KEYWORDS)
    fast = {name: value for name, value in KEYWORDS.items() if name != "o_data_type"}

    def bucket() -> Callable[[], None]:
        step = engine.step(count)
        return lambda: step.replay(graph)

    lengths = {**KEYWORDS, "seq_lens": pinned(metadata.host.seq_lens)}
    found = median_us(
        lambda: eager.plan(*arguments, **KEYWORDS),
        lambda: eager.plan(*arguments, **lengths),
        lambda: engine.step(),
        lambda: captured.plan(*captured_arguments, **KEYWORDS),
        lambda: fast_decode_plan(captured, *captured_arguments, global_override_indptr_cpu=arguments[0], **fast),
        bucket,
    )
    names = (
        "bare_plan",
        "bare_plan_given_lengths",
        "build_commit_plan",
        "bare_plan_graph",
        "bare_fast_plan_graph",
        "build_commit_plan_graph",
    )
    result = dict(zip(names, found, strict=True))
    result["ratio"] = result["build_commit_plan"] / result["bare_plan"]
    result["ratio_given_lengths"] = result["build_commit_plan"] / result["bare_plan_given_lengths"]
    result["ratio_graph"] = result["build_commit_plan_graph"] / result["bare_plan_graph"]
    return result


def layer_graph(engine: Engine) -> Any:
    """A graph of one layer over a step of the whole batch."""
    metadata = engine.builder.capture(engine.count)
    engine.forward(metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    with torch.cuda.graph(graph):
        metadata.record()
        engine.forward(metadata)
    gc.enable()
    return graph


def forwards(count: int) -> dict[str, float]:
    """One layer: the plugin's forward beside a bare run and the same cache write."""
    engine = Engine(count)
    metadata = engine.step()
    wrapper, arguments = bare_wrapper(engine, metadata, graph=False)
    wrapper.plan(*arguments, **KEYWORDS)
    write, slots = CacheWriter(), metadata.slot_mapping
    caches = tuple(engine.cache.unbind(1))
    output = torch.empty_like(engine.query)

    def bare() -> None:
        write(engine.key, engine.value, *caches, slots)
        wrapper.run(engine.query, caches, out=output)

    def ours() -> None:
        engine.forward(metadata, output)

    result = dict(zip(("bare", "forward"), median_us(bare, ours, rounds=500), strict=True))
    device = dict(zip(("bare_device", "forward_device"), device_us(bare, ours), strict=True))
    result |= device | {"added": result["forward"] - result["bare"]}
    result["device_ratio"] = result["forward_device"] / result["bare_device"]
    return result


def replays(count: int) -> dict[str, float]:
    """A step of a captured size, one layer: the host's part, and until it is done."""
    engine = Engine(count)
    graph = layer_graph(engine)
    done: list[float] = []

    def step() -> None:
        engine.step(count).replay(graph)

    def until_done() -> None:
        start = time.perf_counter_ns()
        engine.step(count).replay(graph)
        torch.cuda.synchronize()
        done.append((time.perf_counter_ns() - start) / 1000)

    (host,) = median_us(step)
    for _ in range(120):
        until_done()
    return {"host": host, "until_done": statistics.median(done[20:])}


def kernels(count: int, heads: int, kv_heads: int, xqa: bool) -> dict[str, float]:
    """Decodes of one token by kernel: device time of a run, host time of a plan."""
    found: dict[str, float] = {}
    names = ["tensor_cores", "cuda_cores", *(["xqa"] if xqa else [])]
    for name in names:
        engine = Engine(count, {"decode": name}, heads, kv_heads)
        metadata = engine.step()
        output = torch.empty_like(engine.query)
        part = engine.impl._plans.step.parts[0]
        engine.forward(metadata, output)
        caches = tuple(engine.cache.unbind(1))
        (found[f"{name}_device"],) = device_us(
            lambda part=part, o=output, e=engine, c=caches: part.run(e.query, c, out=o)
        )
        if name != "xqa":
            wrapper, arguments = bare_wrapper(engine, metadata, graph=False, tensor_cores=name == "tensor_cores")
            (found[f"{name}_plan"],) = median_us(
                lambda w=wrapper, a=arguments: w.plan(*a, **KEYWORDS), rounds=50, warm=5
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--only", default="plans,forwards,replays,kernels")
    parser.add_argument("--xqa", action="store_true", help="measure XQA too (a group of 4 heads)")
    args = parser.parse_args()
    only = args.only.split(",")
    report: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "cores": os.cpu_count(), "python": platform.python_version(), "flashinfer": modules.version(),
        },
        "date": datetime.date.today().isoformat(),
        "what": f"bf16, {HEADS} heads over {KV_HEADS} of {SIZE}, pages of {PAGE}, contexts {SHORTEST}..{LONGEST}; us",
    }  # fmt: skip
    jobs: list[tuple[str, str, Callable[[], dict[str, float]]]] = []
    if "plans" in only:
        jobs += [("plans", str(count), lambda count=count: plans(count)) for count in (256, 64, 16, 1)]
    if "forwards" in only:
        jobs += [("forwards", str(count), lambda count=count: forwards(count)) for count in (256, 64, 16, 1)]
    if "replays" in only:
        jobs += [("replays", str(count), lambda count=count: replays(count)) for count in SIZES]
    if "kernels" in only:
        for count in (256, 16):
            for heads, kv_heads in ((8, 8), (16, 8), (32, 8), (64, 8)):
                xqa = args.xqa and heads == 4 * kv_heads
                jobs.append((
                    "kernels", f"{count} group {heads // kv_heads}",
                    lambda c=count, h=heads, k=kv_heads, x=xqa: kernels(c, h, k, x),
                ))  # fmt: skip
    for table, name, job in jobs:
        try:
            found: Any = {key: round(value, 3) for key, value in job().items()}
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:400]
        report.setdefault(table, {})[name] = found
        print(table, name, found, flush=True)
        torch.cuda.empty_cache()
        if args.save:
            with open(args.save, "w") as file:
                json.dump(report, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
