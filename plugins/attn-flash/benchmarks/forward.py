"""What ``forward`` adds to the bare library call and the same cache write, and what a step costs the host. On a GPU.

    python forward.py [--generation 2|3|4] [--latent HEADS] [--block-size N] [--save FILE.json]

Both are timed in one run, turn by turn: host time of a call, device time by a captured graph of ten calls. Medians.
``bare`` writes to the cache as a layer does (``CacheWriter.into``), ``bare, any cache`` by the writer's own call.
``--latent``: over latent caches (MLA), so many query heads. There the library takes the queries in two parts: ``bare``
makes them of the one tensor that a layer is given, for ``bare, parts given`` they are made before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import attncore
from attncore.builder import InputBatch, MetadataBuilder
from attncore.ops.cache_writer import CacheWriter

LONGEST = 4800
SCALE = 128**-0.5
KINDS: dict[str, list[tuple[int, int]]] = {
    **{f"decode {count}": [(-1, 1)] * count for count in (1, 64, 256)},
    "prefill 4 x 1024": [(0, 1024)] * 4,
    "chunks 8 x 256": [(-1, 256)] * 8,
    "64 decodes, a chunk of 512": [*[(-1, 1)] * 64, (-1, 512)],
}
"""Requests of (context, tokens); -1: a random context below LONGEST."""


class Shape(NamedTuple):
    """A layer's heads, as a request has them."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int = 128
    use_mla: bool = False


def latent(heads: str) -> Shape:
    """Rows as DeepSeek's models have them."""
    return Shape(int(heads), 1, 576, 512, True)


def tensors(config: Any, tokens: int) -> list[Any]:
    """Query, key and value of a layer; no value over latent caches."""
    kv_heads, size = config.num_kv_heads, config.head_size
    sizes = (config.num_heads, size), (kv_heads, size), (kv_heads, size)
    made = [torch.randn(tokens, *one, device="cuda").bfloat16() for one in sizes]
    return [*made[:2], None] if config.use_mla else made


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
        self.scheduled = dict(enumerate(tokens for _, tokens in rows))
        self.metadata = self.builder.build(self.scheduled)
        self.impl, self.next_impl = (backend.impl(f"layers.{index}", scale=SCALE) for index in range(2))
        tokens = self.metadata.num_tokens
        self.tensors = tensors(backend.config, tokens)
        self.output = self.tensors[0].new_empty(
            (*self.tensors[0].shape[:2], backend.config.head_size_v or backend.config.head_size)
        )
        forward = partial(self.impl.forward, *self.tensors, self.cache, self.metadata)
        self.calls: dict[str, Callable[[], Any]] = {"forward": forward, "into output": partial(forward, self.output)}
        if backend.config.use_mla:
            self.bare = self._bare_latent(backend, any_cache=False)
            self.calls["bare, any cache"] = self._bare_latent(backend, any_cache=True)
            self.calls["bare, parts given"] = self._bare(backend, together=False)
        else:
            self.bare = self._bare(backend, together=False)
            self.calls["bare, any cache"] = self._bare(backend, together=False, any_cache=True)
        self.calls["bare"] = self.bare
        if self.metadata.num_prefills and self.metadata.num_decode_tokens and backend.generation == "2":
            self.calls["one bare call"] = self._bare(backend, together=True)

    def first_visits(self, rounds: int = 120) -> dict[str, float]:
        """Host microseconds of a step's first layer and of its second, each of which meets the step for the first time,
        and of the bare calls of a step beside them: medians.
        """
        found: dict[str, list[float]] = {"first layer": [], "second layer": [], "bare": []}
        for turn in range(rounds):
            self.batch.rollback_many(self.scheduled)
            metadata = self.metadata = self.builder.build(self.scheduled)
            for name, impl in (("first layer", self.impl), ("second layer", self.next_impl)):
                start = perf_counter()
                impl.forward(*self.tensors, self.cache, metadata)
                found[name].append(1e6 * (perf_counter() - start))
            start = perf_counter()
            self.bare()
            found["bare"].append(1e6 * (perf_counter() - start))
            if turn % 10 == 9:
                torch.cuda.synchronize()
        return {name: round(statistics.median(times[5:]), 2) for name, times in found.items()}

    def _bare(self, backend: Any, *, together: bool, any_cache: bool = False) -> Callable[[], Any]:
        """The library's calls for such a step and the cache write, on tensors made before. A step of decodes and
        prefills is two calls of generation 2, as in ``forward``, and the copy that makes them one output; ``together``:
        the one call that it could be.
        """
        metadata, (_, key, value) = self.metadata, self.tensors
        if value is None:
            value = key[..., : backend.config.head_size_v]
        slots, write = metadata.slot_mapping, self._write(*backend.kv_cache_views(self.cache), any_cache=any_cache)
        decodes, rows = metadata.num_reqs - metadata.num_prefills, metadata.num_reqs
        if backend.generation != "2" or together or decodes in (0, rows):
            calls = [self._rows(backend, 0, rows, metadata.num_prefills == 0)]
        else:
            calls = [self._rows(backend, 0, decodes, True), self._rows(backend, decodes, rows, False)]

        def call() -> Any:
            write(key, value, slots)
            for kernel, args, fixed in calls:
                found = kernel(*args, **fixed)
            return found

        def both() -> Any:
            write(key, value, slots)
            (decode, args, fixed), (prefill, others, more) = calls
            found = prefill(*others, **more)
            found[:decodes] = decode(*args, **fixed).squeeze(1)
            return found

        if len(calls) == 2:
            return both

        return call

    def layers(self, backend: Any, count: int = 32, rounds: int = 60) -> dict[str, float]:
        """Host microseconds of a layer, of an eager step of so many, each step a new one; and of as many bare calls."""
        impls = [backend.impl(f"host.{index}", scale=SCALE) for index in range(count)]
        found: dict[str, list[float]] = {"bare": [], "forward": []}
        for _ in range(rounds):
            self.batch.rollback_many(self.scheduled)
            metadata = self.builder.build(self.scheduled)
            given = *self.tensors, self.cache, metadata
            torch.cuda.synchronize()
            start = perf_counter()
            for impl in impls:
                impl.forward(*given)
            middle = perf_counter()
            torch.cuda.synchronize()
            again = perf_counter()
            for _ in impls:
                self.bare()
            found["bare"].append(1e6 * (perf_counter() - again) / count)
            found["forward"].append(1e6 * (middle - start) / count)
        self.metadata = metadata
        return {name: round(statistics.median(times[5:]), 2) for name, times in found.items()}

    def _write(self, keys: Any, values: Any, *, any_cache: bool) -> Callable[[Any, Any, Any], None]:
        """The cache write, as a layer does it or by a call that may be given any caches."""
        writer = CacheWriter()
        if any_cache:
            return lambda key, value, slots: writer(key, value, keys, values, slots)
        return writer.into(keys, values)

    def _bare_latent(self, backend: Any, *, any_cache: bool) -> Callable[[], Any]:
        """The one call over latent rows and the cache write, the parts of the queries made by it."""
        metadata, (query, key, _) = self.metadata, self.tensors
        kernel, args, _ = self._rows(backend, 0, metadata.num_reqs, metadata.num_prefills == 0)
        rows, slots = backend.kv_cache_views(self.cache)[0], metadata.slot_mapping
        write = self._write(rows, rows, any_cache=any_cache)
        sizes = backend.config.head_size_v, backend.config.head_size - backend.config.head_size_v
        between, behind = args[1:5], args[6:]

        def call() -> Any:
            write(key, key, slots)
            content, rotated = query.split_with_sizes(sizes, 2)
            return kernel(rotated, *between, content, *behind)

        return call

    def _rows(self, backend: Any, first: int, last: int, decodes: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The library's function for rows of the step, and its arguments."""
        metadata, (query, key, value), library = self.metadata, self.tensors, backend._library
        caches, size = backend.kv_cache_views(self.cache), backend.config.block_size
        host = metadata.host
        longest = int(host.seq_lens[first:last].max())
        lengths, starts = metadata.seq_lens[first:last], metadata.query_start_loc[first : last + 1]
        sums, table = metadata.seq_start_loc[first : last + 1], metadata.block_table[first:last]
        table = table[:, : -(-longest // size)]
        if backend.generation.startswith("3"):
            packed = not decodes and not host.context_lens[first:last].any()
            given = (query, key, value) if packed else (query, *caches)
            content = None
            if (size_v := backend.config.head_size_v) and backend.config.use_mla:
                rows, values = (key, key[..., :size_v]) if packed else caches
                given, content = (query[..., size_v:], rows[..., size_v:], values), query[..., :size_v]
            lengths_of_keys = (starts, None, None, None) if packed else (None, None, None, lengths)
            longest_query = 1 if decodes else metadata.max_query_len
            args = (
                *given, None, None, content, None, starts, *lengths_of_keys, longest_query, longest,
                None if packed else table, *[None] * 8, SCALE, True, -1, -1, *library.before_cap, 0.0, True, None, 0,
                None, 0, *library.last(None, None),
            )  # fmt: skip
            return library.forward, args, {}
        fixed: dict[str, Any] = {"softmax_scale": SCALE, "causal": True}
        if decodes:
            mine = query[int(host.query_start_loc[first]) : int(host.query_start_loc[last])].unsqueeze(1)
            if backend.generation == "2":
                fixed |= {"cache_seqlens": lengths, "block_table": table}
                return library.flash_attn_with_kvcache, (mine, *caches), fixed
            fixed |= {"seqused_k": lengths, "page_table": table, "max_seqlen_q": 1, "max_seqlen_k": longest}
            return library.flash_attn_varlen_func, (mine, *caches), fixed
        fixed |= {"cu_seqlens_q": starts, "max_seqlen_q": metadata.max_query_len, "max_seqlen_k": longest}
        if not host.context_lens[first:last].any():
            fixed["cu_seqlens_k"] = starts
            return library.flash_attn_varlen_func, (query, key, value), fixed
        if backend.generation == "2":
            fixed |= {"cu_seqlens_k": sums, "block_table": table}
        else:
            fixed |= {"seqused_k": lengths, "page_table": table}
        return library.flash_attn_varlen_func, (query, *caches), fixed


def layers(case: Case, backend: Any, count: int = 32) -> dict[str, float]:
    """Milliseconds of a step on the device: of a graph of so many layers, and of as many bare calls."""
    impls = [backend.impl(f"step.{index}", scale=SCALE) for index in range(count)]

    def ours() -> None:
        for impl in impls:
            impl.forward(*case.tensors, case.cache, case.metadata)

    def bare() -> None:
        for _ in impls:
            case.bare()

    times: dict[str, list[float]] = {"bare": [], "forward": []}
    graphs = {"bare": captured(bare, 1), "forward": captured(ours, 1)}
    for _ in range(15):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(found), 4) for name, found in times.items()}


def host_times(calls: dict[str, Callable[[], Any]], turns: int = 40, each: int = 15) -> tuple[dict[str, float], float]:
    """Median microseconds of a call on the host; and of how much longer ``forward`` takes than the ``bare`` call beside
    it. The order changes from turn to turn: a call that follows another of the same kind finds its caches warm.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for turn in range(turns):
        torch.cuda.synchronize()
        for index in range(each):
            shuffled.shuffle(order)
            for name in order:
                call = calls[name]
                start = perf_counter()
                call()
                stop = perf_counter()
                if turn and index:
                    found[name].append(1e6 * (stop - start))
    torch.cuda.synchronize()
    added = [ours - bare for ours, bare in zip(found["forward"], found["bare"], strict=True)]
    return {name: statistics.median(times) for name, times in found.items()}, statistics.median(added)


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
        given = tensors(backend.config, count)
        metadata = builder.capture(count)
        impl.forward(*given, cache, metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        with torch.cuda.graph(graph):
            metadata.record()
            impl.forward(*given, cache, metadata)
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
    parser.add_argument("--generation", choices=("2", "3", "4"), default="2")
    parser.add_argument(
        "--latent", type=latent, default=Shape(), dest="shape", metavar="HEADS", help="query heads over latent caches"
    )
    parser.add_argument("--block-size", type=int, help="tokens of a block; the preferred one by default")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    choice = attncore.select(
        **args.shape._asdict(), dtype="bfloat16", backend="flash", block_size=args.block_size,
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
        "library": backend.probed.library,
        "block_size": backend.config.block_size,
        "shape": {**args.shape._asdict(), "dtype": "bfloat16", "longest": LONGEST},
        "forward": {},
    }
    with torch.inference_mode():
        for kind in KINDS:
            case = Case(backend, kind)
            ours, bare = case.calls["forward"](), case.calls.get("one bare call", case.bare)()
            bare = bare[0] if isinstance(bare, tuple | list) else bare
            error = (ours.float() - bare.float().view_as(ours)).abs().max().item()
            (host, added), device = host_times(case.calls), device_times(case.calls)
            found["forward"][kind] = {
                "host_us": {name: round(value, 2) for name, value in host.items()},
                "added_us": round(added, 2),
                "device_us": {name: round(value, 2) for name, value in device.items()},
                "ratio": round(device["forward"] / device["bare"], 4),
                "largest_difference": error,
                "layers_32_ms": layers(case, backend),
                "layers_32_host_us": case.layers(backend),
                "first_visit_us": case.first_visits(),
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
