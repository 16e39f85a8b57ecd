"""The floor of compiled decodes: a bare model of the same shape, compiled, without attncore and without an engine.

    python benchmarks/compiled_floor.py [--context 664] [--rows 64] [--save FILE]

One decode of each row by plain functions over weights in lists: norms, one product for query, key and value, rotary
positions, flash-attn 2 over a paged cache (``flash_attn_with_kvcache``, which writes the new keys itself), the MLP with
one product for gate and up, logits and the best token. Each layer is one compiled graph around that call; the step is
captured in one CUDA graph, whose replays CUDA events time. Lengths, block table and token ids lie on the device and do
not change. Beside it, the time that the bytes of weights and cache take in a copy of as many bytes on this device.

The shape is that of the Llama in ``transformers_gpu.py``, and 664 is the mean context of ``compiled_engine.py``.
``--device cpu --tiny`` tries the code without a GPU and without flash-attn; its figures mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

sys.path[:0] = [str(Path(__file__).parent)]
from gpu import machine  # noqa: E402

BLOCK = 256
EPSILON = 1e-6


def normed(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


def rotated(x, cosine, sine):
    """(rows, heads, size), by halves."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


def before_attention(x, norm, qkv, cosine, sine, heads, kv_heads, size):
    product = functional.linear(normed(x, norm), qkv).view(len(x), heads + 2 * kv_heads, size)
    query, key, value = product.split((heads, kv_heads, kv_heads), 1)
    return rotated(query, cosine, sine), rotated(key, cosine, sine), value


def behind_attention(x, attended, output, norm, gate_up, down):
    x = x + functional.linear(attended, output)
    gate, up = functional.linear(normed(x, norm), gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)


class Bare:
    """The model, its cache, and one step of it."""

    def __init__(self, args):
        wide = not args.tiny
        self.size, self.heads, self.kv_heads = (128, 16, 8) if wide else (16, 4, 2)
        hidden, inner, layers, vocabulary = (2048, 8192, 16, 32000) if wide else (64, 96, 2, 512)
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.device, self.rows, self.context = args.device, args.rows, args.context
        of_qkv = (self.heads + 2 * self.kv_heads) * self.size
        self.layers = [
            {
                "norms": self.drawn(2, hidden), "qkv": self.drawn(of_qkv, hidden),
                "output": self.drawn(hidden, self.heads * self.size), "gate_up": self.drawn(2 * inner, hidden),
                "down": self.drawn(hidden, inner),
            }
            for _ in range(layers)
        ]  # fmt: skip
        self.embedding, self.norm, self.head = (
            self.drawn(vocabulary, hidden), self.drawn(hidden), self.drawn(vocabulary, hidden),
        )  # fmt: skip
        blocks = -(-args.context // BLOCK)
        shape = (len(self.layers), 2, args.rows * blocks, BLOCK, self.kv_heads, self.size)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.table = torch.arange(args.rows * blocks, dtype=torch.int32, device=self.device).view(args.rows, blocks)
        self.lengths = torch.full((args.rows,), args.context - 1, dtype=torch.int32, device=self.device)
        self.ids = torch.arange(args.rows, device=self.device) + 3
        angles = torch.rand(args.rows, 1, self.size // 2, device=self.device)
        self.cosine, self.sine = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.attend = library() if args.device == "cuda" else self.torch_attend
        options = {"fullgraph": True, "backend": "inductor" if args.device == "cuda" else "eager"}
        self.before = torch.compile(before_attention, **options)
        self.behind = torch.compile(behind_attention, **options)

    def drawn(self, *shape):
        return torch.randn(shape, device=self.device, dtype=self.dtype) * 0.02

    def torch_attend(self, query, keys, values, key, value, lengths, table):
        """In place of the library without a GPU."""
        rows = torch.arange(self.rows)
        last = self.context - 1
        keys[table[rows, last // BLOCK].long(), last % BLOCK] = key
        values[table[rows, last // BLOCK].long(), last % BLOCK] = value
        k, v = (cache[table.long()].flatten(1, 2)[:, : self.context].transpose(1, 2) for cache in (keys, values))
        return functional.scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    def step(self):
        """The best next token of every row."""
        x = functional.embedding(self.ids, self.embedding)
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            query, key, value = self.before(
                x, layer["norms"][0], layer["qkv"], self.cosine, self.sine, self.heads, self.kv_heads, self.size
            )
            attended = self.attend(query, keys, values, key, value, self.lengths, self.table).flatten(1)
            x = self.behind(x, attended, layer["output"], layer["norms"][1], layer["gate_up"], layer["down"])
        return functional.linear(normed(x, self.norm), self.head).argmax(-1)

    def nbytes(self):
        """Read by one step: all weights but the embedding's, and the keys and values of the contexts."""
        weights = [one for layer in self.layers for one in layer.values()] + [self.norm, self.head]
        of_cache = self.cache[:, :, 0].numel() // BLOCK * self.rows * self.context * self.cache.element_size()
        return sum(one.numel() * one.element_size() for one in weights) + of_cache


def library():
    """One call of flash-attn 2 over a paged cache, as the rest of the step wants it."""
    from flash_attn import flash_attn_with_kvcache

    def attend(query, keys, values, key, value, lengths, table):
        return flash_attn_with_kvcache(
            query[:, None], keys, values, key[:, None], value[:, None], cache_seqlens=lengths, block_table=table,
            causal=True,
        )[:, 0]  # fmt: skip

    return attend


def median_us(run, device, count=50):
    times = []
    for _ in range(count):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        else:
            before = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - before))
    return statistics.median(times)


def captured(bare):
    """The step as a CUDA graph's replay; the step itself without a GPU."""
    if bare.device != "cuda":
        return bare.step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            bare.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bare.step()
    return graph.replay


@torch.inference_mode()
def measured(args):
    bare = Bare(args)
    step_us = median_us(captured(bare), args.device)
    nbytes = bare.nbytes()
    half = torch.empty(nbytes // 2, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(half)  # a copy of half as many bytes reads and writes as many in all
    return {
        "rows": args.rows, "context": args.context, "step_us": step_us, "bytes": nbytes,
        "copy_us": median_us(lambda: target.copy_(half), args.device),
    }  # fmt: skip


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true")
    add("--rows", type=int, default=64)
    add("--context", type=int, default=664)
    add("--save", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the code")
    return args


def main(words=None):
    args = arguments(words)
    found = measured(args)
    print(json.dumps(found))
    if args.save:
        args.save.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
