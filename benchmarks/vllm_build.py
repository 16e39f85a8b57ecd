"""The host's time of the vLLM bridge's ``build``, as vLLM's runner calls it: hot in a loop, and with cold caches.

    python benchmarks/vllm_build.py [--rows 1,64,256] [--steps 300] [--evict-mib 320] [--save FILE]

A captured size of decodes whose graph plans by itself, as attn-flashinfer's. As vLLM 0.33's runner does, each step has
new views of persistent tensors for the device, and new tensors of the host over new arrays. There is no device: the
tensors lie on the host, and are treated as those of a device, whose numbers nobody reads. Launches are calls that do
nothing; what the driver takes for them is not counted. ``cold``: a buffer larger than the caches is written before each
step. vLLM's classes are stood in for where it is not installed.

Three ways take turns in one process, in another order each time: ``build`` (the bridge), ``searched`` (the same where
steps are not known by their tensors, and page lists are launched by the host), and ``floor``: what no bridge can leave
out, which is to read starts and lengths of the host by their addresses and to check and fill a step from them, in one
compiled call. Medians, microseconds.
"""

import argparse
import json
import statistics
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bridge_floor import Floor
from gpu import machine
from gpu_work import Flush

from attncore import AdoptedSteps, AttentionBackend, AttentionImpl, BackendConfig, BackendSpec, MultipleOf
from attncore.graphs import capturing, new_graph

BLOCK, MODEL_LEN, BLOCKS = 16, 1024, 16384


def stand_in_for_vllm():
    """The module of vLLM whose classes the bridge derives from, where vLLM is not installed."""
    try:
        import vllm.v1.attention.backend  # noqa: F401
    except ImportError:
        names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend")
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        levels = types.SimpleNamespace(NEVER=0, UNIFORM_SINGLE_TOKEN_DECODE=1, UNIFORM_BATCH=2)
        classes = {name: type(name, (), {}) for name in ("AttentionMetadataBuilder", "AttentionImpl")}
        vars(sys.modules[names[-1]]).update(
            classes, AttentionCGSupport=levels, AttentionType=types.SimpleNamespace(DECODER="decoder")
        )
        return True
    return False


@dataclass
class Given:
    """As much of vLLM's CommonAttentionMetadata as the bridge reads."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True
    seq_lens_cpu_upper_bound: Any = None


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Planless(AttentionBackend):
    """Reads page lists, and its captured sizes are planned by their graphs."""

    name = "planless"
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def plan(self, metadata):
        pass

    def record_plan(self, metadata):
        return True


def backend():
    spec = BackendSpec(
        name="planless", api=1, factory="nowhere:Planless", devices={"any": 0}, dtypes={"bfloat16"}, head_sizes={128},
        block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"}, cuda_graph="uniform", host_lengths="exact",
    )  # fmt: skip
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": BLOCK}
    return Planless(BackendConfig(**sizes, device="cpu", spec=spec))


class Engine:
    """As much of vLLM's runner as makes a step of ``rows`` decodes, each one token longer than the last."""

    def __init__(self, rows):
        int32 = {"dtype": torch.int32}
        self.rows = rows
        self.starts, self.lengths = torch.arange(rows + 1, **int32), torch.full((rows,), 100, **int32)
        self.table = torch.randint(1, BLOCKS, (rows, MODEL_LEN // BLOCK), **int32)
        self.slots = torch.arange(rows)
        self.length = 100

    def step(self):
        rows, self.length = self.rows, 100 + (self.length - 99) % 800
        starts, lengths = np.empty(rows + 1, np.int32), np.full(rows, self.length, np.int32)
        starts[0] = 0
        np.cumsum(np.ones(rows, np.int32), out=starts[1:])
        return Given(
            self.starts[: rows + 1], torch.from_numpy(starts[: rows + 1]), self.lengths[:rows], rows, rows,
            self.table[:rows], self.slots[:rows], True, torch.from_numpy(lengths),
        )  # fmt: skip


def bridge(engine, *, known):
    """The bridge's builder over ``engine``, captured."""
    from attncore.builder.adopted.known_steps import NoKnownSteps
    from attncore.integrations.vllm.metadata_builder import AttncoreMetadataBuilder

    class Builder(AttncoreMetadataBuilder):
        def __init__(self):
            self.backend, self._most, self._bounded, self._recorded = backend(), 0, False, None
            self.steps = AdoptedSteps(
                self.backend, max_num_reqs=engine.rows, max_num_tokens=8192, max_model_len=MODEL_LEN, num_blocks=BLOCKS
            )

    builder = Builder()
    steps = builder.steps
    # As on a device: nothing reads the numbers of tensors.
    steps._on_cpu = steps._known.checks = steps._sizes.values["_on_cpu"] = False
    steps._fields._sum_lengths = launched_nothing(steps._fields)
    metadata = builder.build_for_cudagraph_capture(engine.step())
    if known:
        with capturing(new_graph("cpu")):
            metadata.record()
    else:
        steps._known = NoKnownSteps()
        steps._captured.recorded(engine.rows, plans_itself=True)
    return builder


def launched_nothing(fields):
    """In place of ``SumLengths``: what it does in Python, and no launch."""

    def call(seq_lens, table, pages, columns, longest):
        out, words = pages, fields._words
        return (
            seq_lens.shape[0],
            table.stride(0),
            seq_lens.data_ptr(),
            table.data_ptr(),
            words.data_ptr(),
            out.data_ptr(),
        )

    return call


def measured(rows, args):
    """Microseconds of each way, hot and cold."""
    engine, found = Engine(rows), {}
    build, searched = bridge(engine, known=True), bridge(engine, known=False)
    ways = {"build": build.build, "searched": searched.build, "floor": Floor(bridge(engine, known=False).steps).build}
    flush = Flush(args.evict_mib << 20)
    for cold in (False, True):
        times = {name: [] for name in ways}
        order = list(ways)
        for turn in range(args.steps + 20):
            order = order[1:] + order[:1] if turn % 2 else order[::-1]
            for name in order:
                call = ways[name]
                given = engine.step()
                if cold:
                    flush()
                start = perf_counter_ns()
                call(0, given)
                times[name].append((perf_counter_ns() - start) / 1000)
        found["cold" if cold else "hot"] = {
            name: round(statistics.median(all_of[20:]), 2) for name, all_of in times.items()
        }
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,64,256", help="how many requests decode")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--evict-mib", type=int, default=320, help="what is written before a cold step")
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    stands_in = stand_in_for_vllm()
    results = {"machine": machine(), "vllm": "stood in for" if stands_in else "installed", "rows": {}}
    print(results["machine"], "median us", sep="\n")
    for rows in map(int, args.rows.split(",")):
        found = results["rows"][rows] = measured(rows, args)
        for kind, row in found.items():
            print(f"{rows:4} decodes, {kind:4}: " + ", ".join(f"{name} {us:.2f}" for name, us in row.items()))
    if args.save:
        args.save.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
