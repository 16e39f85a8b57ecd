"""examples/engine.py with compiled layers beside itself without: the same model, requests and device, one process.

    python benchmarks/compiled_engine.py [--backends flash,flashinfer] [--shape 1b] [--save FILE]

A Llama with random weights, of about 1B parameters in bfloat16, and 64 requests that arrive at once. A row for each
backend and each of: ``eager``; ``compiled``, where inductor's cache is empty for the first backend; ``compiled again``,
whose code torch has dropped, so that it comes from inductor's cache as in a second start; ``unfused``, compiled
without one product for linear layers that read the same tensor. ``set_up_s`` is the time of
``Engine(...)``, captures included; kernels of the library are loaded before. ``decode_us`` is the median device time of
the graph of 64 decodes, by CUDA events; without graphs the time of the forward pass of as many decodes on the host's
clock. ``tokens_per_s`` counts from the first step to the last.

``--device cpu --shape tiny`` tries the code without a GPU; its figures mean nothing. Exit code 1 where a step was
compiled again or a graph broke, or in float32 where tokens differ; in bfloat16, compiled code rounds otherwise, and
``agrees`` is the part of all tokens that come before the first that differs.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
import engine as example  # noqa: E402
from gpu import machine  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers_gpu import agreement, drawn, free_memory, model_of  # noqa: E402

from attncore import NoBackendError  # noqa: E402

WAYS = ("eager", "unfused", "compiled", "compiled again")
SIZE = 64


class Timed(example.Engine):
    """The engine, which keeps the time of each step of ``SIZE`` decodes."""

    def __init__(self, model, **options):
        self.spans, self.on_gpu = [], str(model.device).startswith("cuda")
        self.captures = bool(options["graph_sizes"])  # the graph is timed then, which can hold no event itself
        super().__init__(model, **options)
        self.graphs = {size: TimedGraph(graph, self) if size == SIZE else graph for size, graph in self.graphs.items()}
        self.spans.clear()

    def _forward(self, metadata):
        if self.captures or metadata.num_tokens != SIZE or len(metadata.place) != SIZE:
            return super()._forward(metadata)
        with Span(self):
            return super()._forward(metadata)

    def decode_us(self):
        """The median, None where there was no such step."""
        if self.on_gpu:
            torch.cuda.synchronize()
        times = [1e3 * a.elapsed_time(b) if self.on_gpu else 1e6 * (b - a) for a, b in self.spans]
        return statistics.median(times) if times else None


class Span:
    """The time between two points of the stream, or of the host."""

    def __init__(self, engine):
        self.engine = engine

    def _now(self):
        if not self.engine.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self):
        self.start = self._now()

    def __exit__(self, *_):
        self.engine.spans.append((self.start, self._now()))


class TimedGraph:
    def __init__(self, graph, engine):
        self.graph, self.engine = graph, engine

    def replay(self):
        with Span(self.engine):
            self.graph.replay()


def row_of(model, way, backend, prompts, args):
    """One engine's figures, and what it said."""
    torch.compiler.reset()
    counters.clear()
    size, longest = 256 if backend == "flash" else 16, args.prompt + args.new + 1
    captured = args.device == "cuda" and backend != "reference"
    start = time.perf_counter()
    engine = Timed(
        model, num_blocks=(SIZE + 2) * -(-longest // size) + 1, max_num_reqs=SIZE, max_model_len=longest,
        max_num_batched_tokens=args.budget, block_size=size, backend=backend, graph_sizes=(1, SIZE) if captured else (),
        compile=False if way == "eager" else {"backend": args.compiler, "fuse": way != "unfused"},
    )  # fmt: skip
    set_up, graphs = time.perf_counter() - start, counters["stats"]["unique_graphs"]
    vocab = engine.vocab_size
    engine.complete(drawn([args.prompt] * 2, vocab, seed=1), 4)  # libraries make their workspaces
    engine.spans.clear()
    start = time.perf_counter()
    outputs = engine.complete(prompts, args.new)
    wall = time.perf_counter() - start
    row = {
        "way": way, "backend": f"{engine.choice.name} {engine.choice.variant}".strip(),
        "set_up_s": round(set_up, 2), "decode_us": engine.decode_us(), "decode_steps": len(engine.spans),
        "tokens_per_s": sum(map(len, outputs)) / wall, "wall_s": wall,
        "graphs": graphs, "compiled_later": counters["stats"]["unique_graphs"] - graphs,
        "graph_breaks": sum(counters["graph_break"].values()),
        "from_inductors_cache": counters["inductor"]["fxgraph_cache_hit"],
    }  # fmt: skip
    engine.close()
    return row, outputs


def rows_of(model, backend, prompts, args):
    """Rows of a backend, printed. Its kernels are loaded by an engine that is not measured."""
    said = None
    for way in ("loads", *WAYS):
        loads = way == "loads"
        try:
            row, outputs = row_of(model, WAYS[0] if loads else way, backend, prompts[:2] if loads else prompts, args)
        except (NoBackendError, ValueError) as error:
            row, outputs = {"way": way, "backend": backend, "error": str(error).splitlines()[0]}, None
        free_memory(args)
        if loads and outputs is not None:
            continue
        if outputs is not None:
            said = said or outputs
            row["agrees"] = agreement(said, outputs)
        print(json.dumps(row), flush=True)
        yield row
        if outputs is None:
            return


def faults_of(rows, exact):
    """What makes the run fail, in words."""
    for row in rows:
        who = f"{row['backend']}, {row['way']}"
        if "error" in row:
            yield f"{who}: {row['error']}"
            continue
        for name in ("compiled_later", "graph_breaks"):
            if row[name]:
                yield f"{who}: {name} {row[name]}"
        if exact and row["agrees"] < 1:
            yield f"{who}: tokens differ from eager's"


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", choices=("tiny", "1b"), default="1b")
    add("--backends", default="flash,flashinfer", help="of flash, flashinfer, rocm, reference")
    add("--compiler", default="inductor", help="backend of torch.compile")
    add("--prompt", type=int, help="tokens of each prompt (default: 600; tiny: 20)")
    add("--new", type=int, help="new tokens of each request (default: 128; tiny: 8)")
    add("--budget", type=int, default=4096, help="tokens of a step at most")
    add("--save", metavar="FILE")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --shape tiny tries the code")
    args.tiny = args.shape == "tiny"
    args.prompt, args.new = args.prompt or (20 if args.tiny else 600), args.new or (8 if args.tiny else 128)
    return args


def main(words=None):
    args = arguments(words)
    rows, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=empty):
        for backend in args.backends.split(","):
            model = model_of(args)  # anew, for compiling leaves fused projections in it
            prompts = drawn([args.prompt] * SIZE, model.config.vocab_size, seed=0)
            rows += rows_of(model, backend, prompts, args)
            exact = model.dtype == torch.float32
            del model
            gc.collect()
    faults = list(faults_of(rows, exact))
    found = {
        "machine": machine(), "shape": args.shape, "device": args.device, "requests": SIZE, "prompt": args.prompt,
        "new": args.new, "compiler": args.compiler, "seconds": time.perf_counter() - start, "rows": rows,
        "faults": faults,
    }  # fmt: skip
    if args.save:
        Path(args.save).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("seconds", "faults")}, indent=1))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
