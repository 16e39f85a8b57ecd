"""The same steps by each backend that can be used here, turn by turn in one process: which one should come first?

    python benchmarks/steps_of_each_backend.py [--backends NAME[:GENERATION],...] [--latent HEADS] [--save FILE]

Decode steps (captured, where the backend can be), an eager step of prefills beside decodes, and a prefill; of one layer
and of many. Medians, in microseconds: ``build`` and ``run`` are the host's (build with plan and send; replay, or each
layer's forward), ``done`` is until the device is, ``device`` is the device's part alone, between events, the host's
time hidden behind a sleep. Each backend has the block size that it prefers, caches of its own that do not fit the
device's cache, and the same requests. ``--latent`` gives the layers latent caches (MLA) and so many query heads.
``--device cpu --tiny`` tries the code without a GPU; its figures mean nothing. Exit code 1 where a backend failed or
left some of its output unwritten.
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import statistics
import sys
import warnings
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu import machine
from gpu_work import captured, synchronize

import attncore
from attncore import InputBatch, MetadataBuilder

DTYPE = "bfloat16"
SHORTEST, LONGEST = 512, 4096
MODEL_LEN = 8448  # what a captured step has to allow for; of whole blocks of 16, 128 and 256
CACHE_BYTES = 12 << 30  # of one backend, in a case: its layers share what does not fit
SLEEP = 4_000_000  # cycles, about 2 ms: longer than the host needs for build and replay
SLEEP_A_LAYER = 800_000  # about 0.4 ms: longer than the host needs for a forward
LIBRARIES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "vllm",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "attn-flash",
    "attn-flashinfer",
)
FIGURES = ("build", "run", "done", "device")


class Shape(NamedTuple):
    """A layer's heads, as a request has them."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int = 128
    use_mla: bool = False

    def __str__(self):
        rows = f", of which {self.head_size_v} are the values (a latent cache)" if self.use_mla else ""
        return f"{self.num_heads} heads over {self.num_kv_heads} of {self.head_size}{rows}"


def latent(heads):
    """Rows as DeepSeek's models have them."""
    return Shape(int(heads), 1, 576, 512, True)


class Case:
    """Requests of (context, tokens), the same for every backend, through so many layers."""

    def __init__(self, name, rows, layers, *, graph=False):
        self.name = f"{name}, {layers} layer{'s' if layers > 1 else ''}"
        self.rows, self.layers, self.graph = rows, layers, graph


def cases(tiny):
    """The steps that are measured."""
    draw = torch.Generator().manual_seed(20261122)
    scale = 64 if tiny else 1

    def decodes(count):
        return [(int(one), 1) for one in torch.randint(SHORTEST // scale, LONGEST // scale, (count,), generator=draw)]

    counts = (1, 4) if tiny else (1, 8, 64, 256)
    chunk, prompt, whole = 512 // scale, 2048 // scale, 8192 // scale
    mixed = [*decodes(4 if tiny else 32), (chunk, chunk), (0, chunk), (0, chunk), (0, prompt)]
    steps = [(f"decode of {count}", decodes(count), True) for count in counts]
    steps.append(("eager, 32 decodes beside prefills of 512 (three) and 2048", mixed, False))
    steps.append(("eager, prefill of 8192", [(0, whole)], False))
    for name, rows, graph in steps:
        for layers in (1, 2 if tiny else 32):
            yield Case(name, rows, layers, graph=graph)


class Engine:
    """A backend at a case: the same step again and again, its tokens taken back in between."""

    def __init__(self, backend, case, device):
        config = backend.config
        self.backend, self.case, self.device = backend, case, device
        self.graph = case.graph and backend.config.spec.cuda_graph != "never"
        size = backend.config.block_size
        lengths = [context + tokens for context, tokens in case.rows]
        counts = [-(-(length + 1) // size) for length in lengths]
        draw = torch.Generator().manual_seed(sum(counts))
        order = (torch.randperm(sum(counts), generator=draw) + 1).tolist()
        self.batch = InputBatch(max_num_reqs=len(lengths), max_model_len=MODEL_LEN, block_size=size)
        self.tokens = sum(tokens for _, tokens in case.rows)
        self.impls = [backend.impl(f"layers.{index}", scale=128**-0.5) for index in range(case.layers)]
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=max(self.tokens, 256))
        for index, ((context, _), count) in enumerate(zip(case.rows, counts, strict=True)):
            self.batch.add_request(index, [order.pop() for _ in range(count)], context)
        self.scheduled = {index: tokens for index, (_, tokens) in enumerate(case.rows)}
        self.bucket = len(lengths) if self.graph else None
        values = 0 if config.use_mla else config.head_size_v or config.head_size
        nbytes = (sum(counts) + 2) * size * config.num_kv_heads * (config.head_size + values) * 2
        self.caches = [
            backend.allocate_kv_cache(sum(counts) + 1) for _ in range(min(case.layers, max(1, CACHE_BYTES // nbytes)))
        ]
        for cache in self.caches:
            cache.normal_()
        draw.manual_seed(1)
        size_v, kv_heads = config.head_size_v or config.head_size, config.num_kv_heads
        sizes = (config.num_heads, config.head_size), (kv_heads, config.head_size), (kv_heads, size_v)
        self.tensors = [torch.randn(self.tokens, *size, generator=draw).to(device, torch.bfloat16) for size in sizes]
        if config.use_mla:
            self.tensors[2] = None
        self.output = self.tensors[0].new_full((self.tokens, config.num_heads, size_v), float("nan"))
        self.booked = False
        if self.graph:
            self._capture()

    def _capture(self):
        metadata = self.builder.capture(self.bucket)
        self._layers(metadata)
        synchronize()

        def model():
            metadata.record()
            self._layers(metadata)

        self.model = captured(model, self.device)
        synchronize()
        self.output.fill_(float("nan"))

    def _layers(self, metadata):
        for index, impl in enumerate(self.impls):
            impl.forward(*self.tensors, self.caches[index % len(self.caches)], metadata, self.output)

    def prepare(self):
        """Untimed: the batch is as it was before the step."""
        if self.booked:
            self.batch.rollback_many(self.scheduled)
        self.booked = True

    def build(self):
        self.metadata = self.builder.build(self.scheduled, bucket=self.bucket)

    def run(self):
        if self.graph:
            self.metadata.replay(self.model)
        else:
            self._layers(self.metadata)

    def times(self):
        """(build, run, done) of one step, nanoseconds of the host; the device is idle before."""
        self.prepare()
        synchronize()
        start = perf_counter_ns()
        self.build()
        built = perf_counter_ns()
        self.run()
        ran = perf_counter_ns()
        synchronize()
        return built - start, ran - built, perf_counter_ns() - start

    def device_time(self):
        """Nanoseconds of the device for one step; 0 on a CPU."""
        if self.device == "cpu":
            return 0
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.prepare()
        synchronize()
        torch.cuda._sleep(SLEEP + (0 if self.graph else SLEEP_A_LAYER * self.case.layers))
        first.record()
        self.build()
        self.run()
        last.record()
        hidden = not first.query()  # the device still slept when the host had issued all of it
        synchronize()
        return first.elapsed_time(last) * 1e6 if hidden else float("nan")

    def close(self):
        if self.graph:
            del self.model
            self.builder.release(self.bucket)
        self.builder.close()


def measure(case, backends, args):
    """Figures by backend, each made anew by what ``backends`` has; one that fails says why, and the others go on."""
    engines, found = {}, {}
    for name, create in backends.items():
        try:
            engine = Engine(create(), case, args.device)
            for _ in range(3):
                engine.times()
                engine.device_time()
            engines[name] = engine
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
    if not engines:
        return found
    taken = {name: [] for name in engines}
    order = list(engines)
    gc.collect()
    gc.disable()
    try:
        for _ in range(args.rounds):
            for name in order:
                taken[name].append((*engines[name].times(), engines[name].device_time()))
            order.append(order.pop(0))
    finally:
        gc.enable()
    fresh = fresh_rows(case)
    first = engines[order[0]].output[fresh].float()
    for name, engine in engines.items():
        columns = [[value for value in column if value == value] for column in zip(*taken[name], strict=True)]
        row = {
            figure: round(statistics.median(column) / 1000, 2) if column else None
            for figure, column in zip(FIGURES, columns, strict=True)
        }
        row |= {"captured": engine.graph, "block_size": engine.backend.config.block_size}
        row["device_rounds"] = len(columns[-1])
        row["finite"] = bool(engine.output.isfinite().all())
        if len(first):
            row["largest_difference"] = (engine.output[fresh].float() - first).abs().max().item()
        found[name] = row
        engine.close()
    return found


def fresh_rows(case):
    """The output's rows of requests without a context: backends agree in them, whatever their caches hold."""
    rows, start = [], 0
    for context, tokens in case.rows:
        rows += range(start, start + tokens) if not context else ()
        start += tokens
    return rows


def selected(args):
    """What makes the backends that can be used here, by the name asked for; and why not the others."""
    found, missing = {}, {}
    for asked in args.backends.split(","):
        name, _, generation = asked.partition(":")
        options = {"options": {name: {"generation": generation}}} if generation else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # whatever a library's import warns of
                choice = attncore.select(**args.shape._asdict(), dtype=DTYPE, backend=name, **options)
                create = functools.partial(choice.create, device=args.device)
                create()
            found[asked] = create
        except (attncore.AttncoreError, ValueError, ImportError) as error:
            missing[asked] = str(error)[:400]
    return found, missing


def versions():
    installed = {}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def table(found, names):
    """Markdown: host (build + run), done and device by backend, a line for each case."""
    yield "| build + run, done (device), us | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for case, rows in found.items():
        cells = []
        for name in names:
            row = rows[name]
            cells.append(
                "failed"
                if "failed" in row
                else f"{row['build']:.1f} + {row['run']:.1f}, {row['done']:.0f} ({row['device'] or 0:.0f})"
            )
        yield f"| {case} | " + " | ".join(cells) + " |"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="flash:4,flash:2,flashinfer", help="NAME or NAME:GENERATION, by commas")
    parser.add_argument(
        "--latent", type=latent, default=Shape(), dest="shape", metavar="HEADS", help="query heads over latent caches"
    )
    parser.add_argument("--rounds", type=int, default=40, help="turns of every backend (default 40)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--tiny", action="store_true", help="short contexts, few requests: does it work?")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is less than 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the code")
    chosen = [case for case in cases(args.tiny) if args.only in case.name]
    if not chosen:
        parser.error(f"--only: no case's name has {args.only!r} in it")
    backends, missing = selected(args)
    if not backends:
        parser.error(f"--backends: none can be used here: {missing}")
    found = {
        "machine": machine() | {"versions": versions()},
        "what": f"{DTYPE}, {args.shape}, contexts {SHORTEST} to {LONGEST} of at "
        f"most {MODEL_LEN}, the backends in turn; medians of {args.rounds}, us" + (", tiny" if args.tiny else ""),
        "not_here": missing,
        "cases": {},
    }
    print(json.dumps(found), flush=True)
    with torch.inference_mode():
        for case in chosen:
            found["cases"][case.name] = measure(case, backends, args)
            print(case.name, json.dumps(found["cases"][case.name]), flush=True)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if args.save:  # what is there so far, should the time run out
                args.save.parent.mkdir(parents=True, exist_ok=True)
                args.save.write_text(json.dumps(found, indent=1) + "\n")
    print(*table(found["cases"], list(backends)), sep="\n")
    rows = [row for case in found["cases"].values() for row in case.values()]
    return any("failed" in row or not row["finite"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
