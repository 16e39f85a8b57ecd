"""The plugin's Triton kernels beside aiter's unified_attention on one CUDA device: device time of captured graphs.

    ATTNCORE_ROCM_DEV_DEVICE=cuda python plugins/attn-rocm/benchmarks/sanity.py [--tune] [--save FILE]

A figure of an NVIDIA GPU says nothing of an AMD one; it shows that the kernels are no toys. aiter's kernel is found
where its Triton part (``aiter/ops/triton``) is on PYTHONPATH, and left out elsewhere. Batches of 32 query heads over 8,
head size 128, bfloat16, blocks of 16: ``decode``, 64 requests of 100 to 2000 tokens with a query each; ``mixed``, the
same with 1 to 64 queries each; ``few long``, 4 requests of 16,000 to 32,000 tokens with a query each; ``prompts``, 8
whole prompts of 1000 to 2000 tokens.

Each candidate is captured in a graph; graphs are replayed in turns and timed by events; medians. Every output is
compared with float32 attention by torch.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from attn_rocm import launch, tiles

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
BATCHES = {"decode": (64, 100, 2000, 1), "mixed": (64, 100, 2000, 64), "few long": (4, 16000, 32000, 1),
           "prompts": (8, 1000, 2000, 2000)}  # fmt: skip
"""Requests, least and most tokens, most queries (as many as that: whole prompts)."""
SCALE = SIZE**-0.5
DEVICE = "cuda"


class Batch:
    """A step: queries, a cache, its table."""

    def __init__(self, kind, seed=0, dtype=torch.bfloat16):
        self.requests, least, most, most_queries = BATCHES[kind]
        random = np.random.default_rng(seed)
        keys = random.integers(least, most + 1, self.requests)
        queries = np.minimum(random.integers(1, most_queries + 1, self.requests), keys)
        if most_queries == most:
            queries = keys
        pages = -(-keys // PAGE)
        total = int(pages.sum())
        ids = random.permutation(total)
        table = np.zeros((self.requests, int(pages.max())), np.int32)
        taken = 0
        for row, count in enumerate(pages):
            table[row, :count] = ids[taken : taken + count]
            taken += count
        starts = np.concatenate(([0], np.cumsum(queries)))
        torch.manual_seed(seed)
        self.keys, self.queries, self.starts_host = keys, queries, starts
        self.query = torch.randn(int(starts[-1]), HEADS, SIZE, device=DEVICE).to(dtype)
        self.cache = torch.randn(2, total, PAGE, KV_HEADS, SIZE, device=DEVICE).to(dtype)
        self.output = torch.empty_like(self.query)
        self.table = torch.from_numpy(table).to(DEVICE)
        self.lengths = torch.from_numpy(keys.astype(np.int32)).to(DEVICE)
        self.starts = torch.from_numpy(starts.astype(np.int32)).to(DEVICE)
        self.most_queries, self.longest = int(queries.max()), int(keys.max())

    def expected(self):
        outputs = []
        for row in range(self.requests):
            length, count = int(self.keys[row]), int(self.queries[row])
            ids = self.table[row, : -(-length // PAGE)].long()
            key, value = (part[ids].reshape(-1, KV_HEADS, SIZE)[:length].float() for part in self.cache)
            key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (key, value))
            query = self.query[int(self.starts_host[row]) :][:count].float().transpose(0, 1)
            hidden = torch.ones(count, length, dtype=torch.bool, device=DEVICE).triu(1 + length - count)
            score = (query @ key.transpose(1, 2) * SCALE).masked_fill(hidden, -math.inf)
            outputs.append((score.softmax(-1) @ value).transpose(0, 1))
        return torch.cat(outputs)


def ours(batch, tile=None, parts=None):
    launcher = launch.Launcher(
        HEADS, KV_HEADS, SIZE, "sm_90", torch.cuda.get_device_properties(0).multi_processor_count
    )
    if tile is not None:
        launcher._tile = lambda *_: tile
    keys = launch.Keys(batch.lengths, batch.longest, batch.cache[0], batch.cache[1], batch.table)
    scoring = launch.Scoring(scale=SCALE)

    def run():
        before = tiles.PARTS_PER_UNIT
        tiles.PARTS_PER_UNIT = before if parts is None else parts
        launcher(
            batch.query, batch.output, None, batch.starts, keys, scoring, most_queries=batch.most_queries,
            one_token_each=batch.most_queries == 1,
        )  # fmt: skip
        tiles.PARTS_PER_UNIT = before

    return run


def aiters(batch):
    from aiter.ops.triton.utils._triton import arch_info

    arch_info.get_arch = lambda: "sm_90"  # on CUDA it gives a number, and the import wants a name
    from aiter.ops.triton import unified_attention as module

    def known_on_cuda(select):
        def selected(*args, **kwargs):
            found = select(*args, **kwargs)
            for config in found if isinstance(found, tuple) else (found,):
                config.pop("waves_per_eu", None)  # an option of AMD's compiler alone
            return found

        return selected

    if not hasattr(module, "of_attn_rocm"):
        module.of_attn_rocm = True
        module.select_2d_config = known_on_cuda(module.select_2d_config)
        module.select_3d_config = known_on_cuda(module.select_3d_config)
    unified_attention = module.unified_attention

    def run():
        unified_attention(
            q=batch.query, k=batch.cache[0], v=batch.cache[1], out=batch.output, cu_seqlens_q=batch.starts,
            max_seqlen_q=batch.most_queries, seqused_k=batch.lengths, max_seqlen_k=batch.longest, softmax_scale=SCALE,
            causal=True, window_size=(-1, -1), block_table=batch.table, softcap=0.0, q_descale=None, k_descale=None,
            v_descale=None,
        )  # fmt: skip

    return run


def captured(run):
    run()
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def measure(batch, candidates, rounds):
    """Microseconds of each candidate (median, in turns), and its error."""
    wanted, graphs, errors = batch.expected(), {}, {}
    for name, run in candidates.items():
        try:
            batch.output.fill_(math.nan)
            graphs[name] = captured(run)
            batch.output.fill_(math.nan)
            graphs[name].replay()
            torch.cuda.synchronize()
            errors[name] = float((batch.output.float() - wanted).norm() / wanted.norm())
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            graphs.pop(name, None)
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        marks = []
        for name, graph in graphs.items():
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            marks.append((name, first, last))
        torch.cuda.synchronize()
        for name, first, last in marks:
            times[name].append(1000 * first.elapsed_time(last))
    return {
        name: {"us": round(statistics.median(values), 1), "min_us": round(min(values), 1), "error": errors[name]}
        for name, values in times.items()
    }


def grid(kind):
    """Candidates for the table of tiles."""
    if kind == "decode":
        shapes = itertools.product((16,), (32, 64, 128), (2, 4, 8), (2, 3, 4))
        return [(tiles.Tile(*shape), parts) for shape in shapes for parts in (0, 8, 16, 32)]
    shapes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))
    return [(tiles.Tile(*shape), None) for shape in shapes]


def warm(kind, index, count):
    """Compile a share of the candidates in a process of its own, for the cache on disk."""
    batch = Batch(kind)
    for tile, parts in grid(kind)[index::count]:
        try:
            ours(batch, tile, parts)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)


def machine():
    import triton

    cpus = [one for one in Path("/proc/cpuinfo").read_text().splitlines() if one.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(),
        "cpu": cpus[0].split(":")[1].strip() if cpus else "", "cores": os.cpu_count(),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="measure every candidate for the table of tiles, too")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    found = {"machine": machine(), "batches": {}}
    for kind in BATCHES:
        batch = Batch(kind)
        candidates = {"attn-rocm": ours(batch)}
        try:
            candidates["aiter"] = aiters(batch)
        except ImportError as error:
            print(f"aiter is left out: {error}", file=sys.stderr)
        if args.tune and kind in ("decode", "mixed"):
            count = min(12, os.cpu_count() or 1)
            with ProcessPoolExecutor(count) as pool:
                list(pool.map(warm, [kind] * count, range(count), [count] * count))
            for tile, parts in grid(kind):
                candidates[f"{tuple(tile)} parts {parts}"] = ours(batch, tile, parts)
        rows = measure(batch, candidates, args.rounds)
        found["batches"][kind] = {"keys": int(batch.keys.sum()), "queries": int(batch.queries.sum()), "rows": rows}
        print(kind, f"keys {batch.keys.sum()}, queries {batch.queries.sum()}")
        for name, row in sorted(rows.items(), key=lambda item: item[1]["us"])[:24]:
            print(f"  {row['us']:8.1f} us  (least {row['min_us']:.1f})  error {row['error']:.1e}  {name}", flush=True)
        if "aiter" in rows:
            ratio = rows["attn-rocm"]["us"] / rows["aiter"]["us"]
            print(
                f"  attn-rocm {rows['attn-rocm']['us']} us, aiter {rows['aiter']['us']} us: {ratio:.2f} times",
                flush=True,
            )
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import multiprocessing

    multiprocessing.set_start_method("spawn")
    main()
