"""Decodes over long contexts: one GPU with all keys beside several that share them out (context parallelism).

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--backend flash] [--contexts 8192,131072] [--save FILE]

Layers of attention alone, by default shaped as Llama 8B's: 32 of 32 heads over 8 of 128, in bfloat16. The caches hold
random keys and values, which are the same tokens in both ways. A row for each context and number of decodes, and each
of: ``one``, rank 0 alone over all keys while the others wait; ``ranks``, all over NCCL, one all-gather a layer.
``step_us`` is the median time of a step, by CUDA events: of a graph where the backend can be captured. ``error`` is the
largest difference between the two outputs, in the last layer, and ``scale`` the largest number in them; both in
float32 of what is bfloat16. ``speed_up`` is one's time over ranks', ``sent_bytes`` what a rank sends each other one.
``floor_us`` is the sum of rank 0's time alone over as many keys as a rank keeps, and of a graph of bare all-gathers of
these bytes, one a layer; ``floor_speed_up`` is one's time over it.

What a model computes beside its attention is the same on every rank, and is not in these figures.

``--device cpu --shape tiny`` tries the code by gloo, without a GPU; its times mean nothing. Exit code 1 where outputs
differ by more than ``--tolerance`` of the largest number.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from collective_floor import all_gather, collectives_us
from gpu import machine

import attncore
from attncore.builder import ContextParallel
from attncore.graphs import capturing, new_graph
from attncore.ranks import over_ranks
from attncore.ranks.exchange import Exchange

SHAPES = {
    "8b": {"layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"},
    "tiny": {"layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"},
}


class Decodes:
    """Steps of ``count`` decodes behind ``context`` tokens each, through all layers."""

    def __init__(self, choice, ranks, shape, count, context, device, seed=0):
        self.count, self.device = count, device
        backend = choice.create(device)
        own = ranks or ContextParallel(1, 0, choice.block_size)
        self.backend = backend if ranks is None else over_ranks(backend, ranks)
        blocks = -(-(context + 64) // own.virtual_block_size)
        batch = attncore.InputBatch(
            max_num_reqs=count, max_model_len=blocks * own.virtual_block_size, block_size=own.virtual_block_size,
            num_blocks=count * blocks + 1,
        )  # fmt: skip
        self.builder = attncore.MetadataBuilder(
            batch, self.backend, max_num_batched_tokens=count, context_parallel=ranks
        )
        self.impls = [
            self.backend.impl(f"layers.{layer}", scale=shape["head_size"] ** -0.5) for layer in range(shape["layers"])
        ]
        self.caches = [self.backend.allocate_kv_cache(count * blocks + 1) for _ in self.impls]
        for name in range(count):
            table = range(1 + name * blocks, 1 + (name + 1) * blocks)
            batch.add_request(name, list(table), num_computed_tokens=context)
        self._fill(own, blocks, context, seed)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        kind = {"dtype": getattr(torch, shape["dtype"]), "device": self.device, "generator": generator}
        self.tensors = [
            torch.randn(count, heads, shape["head_size"], **kind)
            for heads in (shape["num_heads"], shape["num_kv_heads"], shape["num_kv_heads"])
        ]
        self.graph, self.output = None, None
        if choice.spec.cuda_graph != "never" and self.device.startswith("cuda"):
            metadata = self.builder.capture(count)
            self._attend(metadata)
            self.graph = new_graph(self.device)
            with capturing(self.graph):
                metadata.record()
                self.output = self._attend(metadata)

    def _fill(self, own, blocks, context, seed):
        """A token's key and value are drawn by its request and position alone, whoever keeps it. One layer's are
        drawn, and copied to the others: the time is that of other memory all the same."""
        keys, values = self.backend.kv_cache_views(self.caches[0])
        generator = torch.Generator(device=self.device).manual_seed(seed + 1)
        for name in range(self.count):
            for first in range(0, context, 1 << 14):
                count = min(1 << 14, context - first)
                size = (2, count, *keys.shape[2:])
                drawn = torch.randn(size, dtype=torch.float32, device=self.device, generator=generator).to(keys.dtype)
                positions = torch.arange(first, first + count)
                virtual = positions + own.virtual_block_size * (1 + name * blocks)
                slots = torch.from_numpy(own.local_slots(virtual.numpy()))
                mine = (slots >= 0).to(self.device)
                slots = slots[slots >= 0].to(self.device)
                places = slots // own.block_size, slots % own.block_size
                keys[places], values[places] = drawn[0][mine], drawn[1][mine]
        for cache in self.caches[1:]:
            for part, drawn in zip(self.backend.kv_cache_views(cache), (keys, values), strict=True):
                part.copy_(drawn)

    @torch.inference_mode()
    def _attend(self, metadata):
        query, key, value = self.tensors
        for impl, cache in zip(self.impls, self.caches, strict=True):
            output = impl.forward(query, key, value, cache, metadata)
            query = query + 0 * output  # layers follow each other, as a model's do
        return output

    def step(self):
        """The output of the last layer."""
        metadata = self.builder.build(bucket=None if self.graph is None else self.count)
        if self.graph is None:
            return self._attend(metadata)
        metadata.replay(self.graph)
        return self.output

    def times(self, steps):
        """Microseconds of each of ``steps`` steps."""
        return [self._timed() for _ in range(steps + 3)][3:]

    def _timed(self):
        if not self.device.startswith("cuda"):
            start = time.perf_counter()
            self.step()
            return 1e6 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.step()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    def close(self):
        if self.graph is not None:
            self.graph = None
            self.builder.release(self.count)
        self.builder.close()
        self.caches = self.impls = self.output = None


def measured(choice, ranks, args, count, context):
    """The output of the first step, and the median time of those behind it."""
    device = "cpu" if args.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    decodes = Decodes(choice, ranks, SHAPES[args.shape], count, context, device)
    first = decodes.step().float().clone()
    step_us, captured = statistics.median(decodes.times(args.steps)), decodes.graph is not None
    decodes.close()
    del decodes
    if first.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return first, step_us, captured


def bare_gathers_us(nbytes, layers, device):
    """Microseconds of as many all-gathers as a step has, of as many bytes from each rank."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    received = sent.new_empty(dist.get_world_size() * nbytes)

    def call():
        for _ in range(layers):
            all_gather(received, sent)

    return collectives_us(call, device)


def rows_of(choice, ranks, args, count, context):
    """Rows of one context and number of decodes; on other ranks than the first, none."""
    shape, alone, part_us = SHAPES[args.shape], None, None
    if not ranks.rank:
        alone = measured(choice, None, args, count, context)
        part_us = measured(choice, None, args, count, context // ranks.world_size)[1]
    dist.barrier()
    sent = Exchange((count, shape["num_heads"], shape["head_size"]), getattr(torch, shape["dtype"]), "cpu").nbytes
    device = "cpu" if args.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    gathers_us = bare_gathers_us(sent, shape["layers"], device)
    together = measured(choice, ranks, args, count, context)
    if ranks.rank:
        return []
    what = {"context": context, "decodes": count, "backend": f"{choice.name} {choice.variant}".strip()}
    rows = [
        {**what, "way": way, "step_us": step_us, "captured": captured}
        for way, (_, step_us, captured) in (("one", alone), ("ranks", together))
    ]
    rows[1] |= {
        "speed_up": alone[1] / together[1], "sent_bytes": sent * shape["layers"],
        "floor_us": part_us + gathers_us, "floor_speed_up": alone[1] / (part_us + gathers_us),
        "error": float((alone[0] - together[0]).abs().max()), "scale": float(alone[0].abs().max()),
    }  # fmt: skip
    return rows


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", choices=tuple(SHAPES), default="8b")
    add("--backend", help="of flash, flashinfer, rocm, reference (default: the one that is chosen)")
    add("--contexts", help="tokens before the decodes (default: 8192,131072; tiny: 40,100)")
    add("--decodes", default="1,4", help="numbers of decodes in a step")
    add("--interleave", type=int, default=1, help="tokens that go to each rank in turn")
    add("--steps", type=int, default=30)
    add("--tolerance", type=float, default=0.02, help="of the largest number of an output")
    add("--save", metavar="FILE")
    args = parser.parse_args(words)
    args.contexts = args.contexts or ("40,100" if args.shape == "tiny" else "8192,131072")
    return args


def main(words=None):
    args = arguments(words)
    if "RANK" not in os.environ:
        print("context_parallel.py: no RANK in the environment; start it by torchrun", file=sys.stderr)
        return 2
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    shape = {name: value for name, value in SHAPES[args.shape].items() if name != "layers"}
    wanted = {"backend": args.backend} if args.backend else {}
    host = attncore.Host.assume("cpu") if args.device == "cpu" else None
    choice = attncore.select(**shape, **wanted, features={"lse"}, host=host)
    ranks = ContextParallel(dist.get_world_size(), dist.get_rank(), choice.block_size, args.interleave)
    rows = []
    for context in map(int, args.contexts.split(",")):
        for count in map(int, args.decodes.split(",")):
            for row in rows_of(choice, ranks, args, count, context):
                print(json.dumps(row), flush=True)
                rows.append(row)
    if not ranks.rank and args.save:
        found = {"machine": machine(), "shape": args.shape, "device": args.device, "ranks": ranks.world_size}
        Path(args.save).write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return int(any(row["error"] > args.tolerance * row["scale"] for row in rows if "error" in row))


if __name__ == "__main__":
    sys.exit(main())
