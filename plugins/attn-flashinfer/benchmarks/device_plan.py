"""Plans of captured decodes that the device makes: are they FlashInfer's own, and what do they cost?

    python plugins/attn-flashinfer/benchmarks/device_plan.py [--seconds 240] [--save FILE]

For each setting (kernel, page size, tokens of each request, group, head size, window) and each captured size, random
batches: what the kernel writes beside what ``plan`` writes, word for word, and the output of a graph that holds the
kernel beside that of a run which the host planned, bit for bit. A graph without the kernel is the control: its outputs
must be wrong. Then times: the kernel on the device, and a built, planned and replayed step on the host by either road.
Settings whose modules are not built compile them first (``build_modules.py main`` beforehand makes most).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from attn_flashinfer import device_plan
from attn_flashinfer.device_plan import DevicePlan, words_that_run_reads
from attn_flashinfer.library import flashinfer
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import CapturedDecode, LayerSettings, Shape

import attncore
from attncore.builder import InputBatch, MetadataBuilder

POOL_TOKENS = 1 << 16
"""Of the cache; rows share its pages, which only read them."""
SIZES = (1, 8, 64, 256)
JUNK = 0x7F
COUNTED = ("cases", "plans that differ", "outputs that differ", "controls", "controls that differ")


class Setting(NamedTuple):
    tensor_cores: bool = True
    page: int = 16
    query_len: int = 1
    group: int = 4
    head_size: int = 128
    window: int | None = None
    kv_heads: int = 8
    longest: int = 8192


SETTINGS = [
    Setting(),
    Setting(page=1, longest=2048),
    Setting(page=64),
    Setting(query_len=4),
    Setting(query_len=4, group=8),
    Setting(query_len=4, page=64, group=1),
    Setting(group=1),
    Setting(group=8),
    Setting(kv_heads=1, group=8),
    Setting(tensor_cores=False),
    Setting(tensor_cores=False, group=1),
    Setting(tensor_cores=False, group=8, page=64),
    Setting(tensor_cores=False, kv_heads=1, group=8, page=1, longest=2048),
    Setting(query_len=40, longest=2048),  # several tiles of queries
    Setting(window=1000),
    Setting(window=33, query_len=4, page=1, longest=2048),
    Setting(head_size=64),
    Setting(head_size=64, window=500, query_len=4),
    Setting(head_size=256, kv_heads=4),
    Setting(head_size=256, kv_heads=4, query_len=4),
    Setting(tensor_cores=False, head_size=64),
    Setting(tensor_cores=False, head_size=64, window=100),
    Setting(tensor_cores=False, head_size=256, kv_heads=4),
]


class Captured:
    """One captured size of one setting, the graphs that run it, and the arrays that every step of it has."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.setting, self.size = setting, size
        heads, page = setting.kv_heads * setting.group, setting.page
        self.most = -(-setting.longest // page)
        shape = Shape(
            heads, setting.kv_heads, setting.head_size, page, torch.bfloat16, torch.bfloat16, "NHD", "cuda",
            setting.tensor_cores,
        )  # fmt: skip
        self.indptr = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
        self.last = torch.ones(size, dtype=torch.int32, device="cuda")
        pool = POOL_TOKENS // page
        indices = torch.randint(0, pool, (size * self.most,), dtype=torch.int32, device="cuda")
        self.decode: Any = CapturedDecode(
            flashinfer(), Workspace("cuda", 64 << 20, 2 << 30),
            LayerSettings(shape, setting.head_size**-0.5, setting.window, None), indptr=self.indptr, indices=indices,
            last_page_len=self.last, query_len=setting.query_len, max_seq_len=setting.longest, proves=True,
        )  # fmt: skip
        self.why = self.decode.why_plan
        if self.decode.layout is None:
            return
        self.node = DevicePlan(self.indptr, [self.decode.table_row()])
        cache = (pool, page, setting.kv_heads, setting.head_size)
        self.cache = tuple(torch.randn(cache, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        tokens = size * setting.query_len
        self.query = torch.randn(tokens, heads, setting.head_size, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.query)
        self.set(torch.full((size,), self.most))
        self.planned, self.stale = (self.graph(head) for head in (self.node, lambda: None))

    def run(self) -> None:
        self.decode.run.run(self.query, self.cache, out=self.out)

    def graph(self, head: Callable[[], None]) -> Any:
        head()
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.disable()
        with torch.cuda.graph(graph):
            head()
            self.run()
        gc.enable()
        return graph

    def set(self, pages: torch.Tensor) -> torch.Tensor:
        """Writes a batch's pages to the device; its page pointers on the host."""
        indptr = torch.zeros(self.size + 1, dtype=torch.int32)
        indptr[1:] = pages.cumsum(0)
        query_len, page = self.setting.query_len, self.setting.page
        last = torch.randint(min(query_len, page), page + 1, (self.size,), dtype=torch.int32)
        self.indptr.copy_(indptr)
        self.last.copy_(torch.where(pages > 0, last, 0))
        return indptr

    def words(self) -> dict[str, torch.Tensor]:
        return words_that_run_reads(self.decode._int_workspace, self.decode.layout, self.decode._plan_sizes)

    def case(self, pages: torch.Tensor, counts: dict[str, Any]) -> None:
        """Compares both roads, and the control, for one batch."""
        indptr = self.set(pages)
        self.decode._plan_pages(indptr, self.last.cpu())
        torch.cuda.synchronize()
        expected, layout = self.words(), self.decode.layout
        self.out.fill_(torch.nan)
        self.run()
        right = self.out.clone()
        self.decode._int_workspace.fill_(JUNK)
        self.node()
        found = self.words()
        counts["cases"] += 1
        differ = [name for name, array in expected.items() if not torch.equal(array, found[name])]
        if differ:
            counts["plans that differ"] += 1
            counts.setdefault("first that differs", {"arrays": differ, "pages": pages.tolist()})
        self.out.fill_(torch.nan)
        self.decode._int_workspace.fill_(JUNK)
        self.planned.replay()
        if int(expected["o_indptr"][-1]) // self.setting.query_len * layout.tiles > layout.padded:
            counts["more chunks than room"] += 1  # of CUDA cores, beside rows without pages: FlashInfer's own fault
            return
        rows = (pages > 0).repeat_interleave(self.setting.query_len).cuda()
        counts["outputs that differ"] += not torch.equal(self.out[rows], right[rows])
        counts["rows compared"] += int(rows.sum())

    def control(self, pages: torch.Tensor, other: torch.Tensor, counts: dict[str, Any]) -> None:
        """The plan of another batch, and the graph without the kernel."""
        self.set(pages)
        self.node()
        self.run()
        right, held = self.out.clone(), (self.indptr.clone(), self.last.clone())
        self.set(other)
        self.node()
        self.indptr.copy_(held[0])
        self.last.copy_(held[1])
        self.out.fill_(torch.nan)
        self.stale.replay()
        rows = (pages > 0).repeat_interleave(self.setting.query_len).cuda()
        counts["controls"] += 1
        counts["controls that differ"] += not torch.equal(self.out[rows], right[rows])


def batch(size: int, most: int, kind: int, least: int) -> torch.Tensor:
    """Pages of each row; ``least`` where it has any."""
    drawn = torch.randint(least, most + 1, (size,))
    pages = {
        0: lambda: torch.full((size,), most),
        1: lambda: drawn,
        2: lambda: torch.randint(least, max(most // 32, least) + 1, (size,)),
        3: lambda: torch.where(torch.rand(size) < 0.1, most, least),
        4: lambda: torch.where(torch.rand(size) < 0.3, 0, drawn),
        5: lambda: torch.where(torch.arange(size) <= torch.randint(0, size, ()), drawn, 0),
    }[kind % 6]()
    return pages.to(torch.int32)


def equality(setting: Setting, size: int, until: float) -> dict[str, Any]:
    row: dict[str, Any] = {**setting._asdict(), "decodes": size}
    try:
        captured = Captured(setting, size)
    except Exception as error:  # a module that cannot be compiled here is no verdict
        return row | {"not run": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    row["why"] = captured.why
    if captured.decode.layout is None:
        return row | {"refused": True}
    row["padded"] = captured.decode.layout.padded
    row |= dict.fromkeys((*COUNTED, "rows compared", "more chunks than room"), 0)
    least, kind = -(-setting.query_len // setting.page), 0
    full = torch.full((size,), captured.most, dtype=torch.int32)
    while kind < 12 or time.monotonic() < until:
        pages = batch(size, captured.most, kind, least)
        captured.case(pages, row)
        if kind % 4 == 1 and setting.query_len == 1:  # of several tokens a stale plan may write beyond the workspace
            captured.control(full, torch.full_like(full, least), row)
        kind += 1
    captured.set(full)
    row["kernel_us_longest"] = device_us(captured.node)
    captured.set(batch(size, captured.most, 1, least))
    row["kernel_us_random"] = device_us(captured.node)
    both = DevicePlan(captured.indptr, [captured.decode.table_row()] * 2)
    row["kernel_us_two_keys"] = device_us(both)
    row["run_us"] = device_us(captured.run)
    return row


def device_us(function: Callable[[], object], calls: int = 20, rounds: int = 30) -> float:
    """Device time of a call, microseconds: many of them in one graph, by events; the median."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    gc.enable()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for index in range(rounds + 3):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(stop) * 1000 / calls)
    return round(statistics.median(times), 2)


class Steps:
    """A batch of decodes that goes on, built, planned and replayed; ``road`` is the option ``plan``."""

    def __init__(self, size: int, road: str, keys: int) -> None:
        asked = {"flashinfer": {"plan": road}}
        self.backend: Any = attncore.select(
            num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=16, backend="flashinfer",
            options=asked,
        ).create()  # fmt: skip
        impls = [self.backend.impl(f"layers.{key}", scale=0.08 + key / 100) for key in range(keys)]
        rows, blocks = 264, size * 264 + 1
        cache = self.backend.allocate_kv_cache(blocks)
        self.batch = InputBatch(max_num_reqs=size, max_model_len=rows * 16, block_size=16, num_blocks=blocks)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=max(size, 64))
        random = np.random.default_rng(size)
        for row in range(size):
            ids = list(range(1 + row * rows, 1 + (row + 1) * rows))
            self.batch.add_request(row, ids, int(random.integers(512, 4096)))
        tensors = [torch.randn(size, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8)]
        metadata = self.builder.capture(size)
        for impl in impls:
            impl.forward(*tensors, cache, metadata)
        torch.cuda.synchronize()
        self.graph, self.size, self.steps = torch.cuda.CUDAGraph(), size, 0
        gc.disable()
        with torch.cuda.graph(self.graph):
            metadata.record()
            for impl in impls:
                impl.forward(*tensors, cache, metadata)
        gc.enable()

    def step(self) -> tuple[float, float]:
        """Microseconds of the host until a step is built, and until its graph was launched."""
        self.steps += 1
        if self.steps % 64 == 0:
            self.batch.rollback_many(dict.fromkeys(range(self.size), 60))
        start = time.perf_counter_ns()
        metadata = self.builder.build(bucket=self.size)
        built = time.perf_counter_ns()
        metadata.replay(self.graph)
        end = time.perf_counter_ns()
        return (built - start) / 1000, (end - start) / 1000


def host_times(size: int, keys: int) -> dict[str, Any]:
    row: dict[str, Any] = {"decodes": size, "plan_keys": keys}
    for road in ("host", "device"):
        steps, found = Steps(size, road, keys), []
        assert steps.backend.plan_of_captured == road, steps.backend.why_plan
        for index in range(330):
            torch.cuda.synchronize()
            one = steps.step()
            if index >= 30:
                found.append(one)
        built, launched = zip(*found, strict=True)
        row[road] = {
            "transport": steps.builder.transport,
            "build_us": round(statistics.median(built), 1),
            "build_and_replay_us": round(statistics.median(launched), 1),
            "build_us_p99": round(sorted(built)[int(0.99 * len(built))], 1),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--save")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    library = flashinfer()
    report: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "flashinfer": library.version, "proven": device_plan.PROVEN,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
        "host": [], "equality": [], "left out for want of time": [],
    }  # fmt: skip

    def keep(part: str, row: dict[str, Any]) -> None:
        report[part].append(row)
        print(json.dumps(row), flush=True)
        if given.save:
            with open(given.save, "w") as file:
                json.dump(report, file, indent=1)

    for size, keys in ((1, 1), (64, 1), (256, 1), (64, 2)):
        keep("host", host_times(size, keys))
    pairs = [(setting, size) for setting in SETTINGS for size in SIZES]
    for index, (setting, size) in enumerate(pairs):
        left = end - time.monotonic()
        if left <= 0:
            report["left out for want of time"].append({**setting._asdict(), "decodes": size})
            continue
        torch.manual_seed(index)
        keep("equality", equality(setting, size, time.monotonic() + left / (len(pairs) - index)))
        gc.collect()
        torch.cuda.empty_cache()
    total = {name: sum(row.get(name, 0) for row in report["equality"]) for name in (*COUNTED, "refused")}
    report["total"] = total
    print(json.dumps({"total": total, "left out": len(report["left out for want of time"])}))
    if given.save:
        with open(given.save, "w") as file:
            json.dump(report, file, indent=1)
    if (
        total["plans that differ"]
        or total["outputs that differ"]
        or total["refused"]
        or not total["controls that differ"]
    ):
        raise SystemExit("plans of the device are not FlashInfer's, or the control was not noticed")


if __name__ == "__main__":
    main()
