"""The host's time of a step between the steps of a served model, where caches are cold: what users feel.

    python benchmarks/served_step.py [--rows 1,64,256] [--backends flash,flashinfer] [--models standin,llama]
                                     [--kinds decode,named,...] [--save FILE]

Two engines run the same kinds of steps. ``llama`` is examples/engine.py over a Llama with random weights. ``standin``
is a loop over a batch and a builder whose model is a kernel that spins for ``--device-ms``: it needs no weights, and
has the kinds that the engine has not. Kinds: ``decode`` (everybody runs one token, ``build()``), ``named`` (the same,
every request named), ``come and go`` (requests end and others join), ``chunk`` (part of a prompt beside the decodes,
without a graph), ``speculative`` (four tokens each, some rejected). The engine launches up to ``--ahead`` steps at once
where everybody decodes, before it reads what the last ones sampled; parts and wall time of those are divided by them.

For each part of a step median, p90 and p99 over ``--steps`` steps in microseconds, as it is between two runs of the
model. ``attncore`` is the sum of build, replay and batch: without the library's plan, the engine's own fields and the
launch of the graph. ``wall / device`` is the time of a step over that of the model on the device; the device's
is taken in steps of their own, since events cost the host time.

``--device cpu`` has no device: the model is a sleep, and a buffer larger than the caches is written after it
(``--evict-mib``, 0: not). The backend reads page lists and plans nothing; the transport's nodes are run by NumPy and
counted as the launch. A trend, no promise.
"""

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
from builder_insides import wrap_parts, wrap_pieces  # noqa: E402
from gpu import machine  # noqa: E402
from gpu_work import Backend, CalledAgain, Flush  # noqa: E402
from nodes_on_host import nodes_on_host  # noqa: E402
from parts import Parts  # noqa: E402
from served_loop import KINDS, Loop  # noqa: E402

OF_ATTNCORE = ("build", "acquire", "arrange", "send", "replay", "batch")
WARM_UP = 20


class Device:
    """What runs the model: launches it, waits for its end, and says how long it took where ``times`` is set."""

    def __init__(self, args):
        self.name, self.seconds, self.times, self.launches = args.device, args.device_ms / 1000, None, 0
        self.flush = Flush(args.evict_mib << 20) if args.device == "cpu" and args.evict_mib else None
        self.cycles = self._cycles() if args.device == "cuda" else 0

    def _cycles(self):
        """Cycles of ``torch.cuda._sleep`` that last as long as the model."""
        torch.cuda._sleep(1000)
        events, cycles = self._events(), 20_000_000
        events[0].record()
        torch.cuda._sleep(cycles)
        events[1].record()
        torch.cuda.synchronize()
        return int(cycles * self.seconds * 1000 / events[0].elapsed_time(events[1]))

    @staticmethod
    def _events():
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def spin(self):
        """The model's kernel, launched."""
        if self.name == "cuda":
            torch.cuda._sleep(self.cycles)

    def launch(self, call, *args):
        """``call(*args)``, which launches the step; its time on the device is noted where times are."""
        self.launches += 1
        if self.times is None or self.name == "cpu":
            return call(*args)
        first, last = self._events()
        first.record()
        answer = call(*args)
        last.record()
        self.times.append((first, last))
        return answer

    def tokens(self, sampled):
        """What was sampled, once the device is done; on a CPU this lasts as long as the model, and evicts caches."""
        tokens = sampled.tolist()
        if self.name == "cpu":
            time.sleep(self.seconds)
            if self.flush is not None:
                self.flush()
        return tokens

    def median_ms(self):
        if self.name == "cpu":
            return 1000 * self.seconds
        torch.cuda.synchronize()
        return statistics.median(first.elapsed_time(last) for first, last in self.times)


def backend_of(name, args):
    """The backend of the stand-in engine."""
    if args.device == "cpu":
        return Backend("cpu")
    import attncore

    asked = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "cuda_graph": "uniform_decode"}
    backend = attncore.select(**asked, block_size=256 if name == "flash" else 16, backend=name).create()
    backend.impl("layers.0", scale=128**-0.5)
    return backend


def graph_of(function, device):
    """A graph of what ``function`` launches."""
    if device.name == "cpu":
        function()
        return CalledAgain(function)
    from attncore.graphs import capturing, new_graph

    with capturing(new_graph(device.name)) as graph:
        function()
    return graph


def engine_of(model, kind, rows, name, args, device, parts):
    """An engine whose ``step`` runs steps of a kind; None where it has no such steps."""
    if model == "standin":
        return Loop(kind, rows, backend_of(name, args), device, parts, args, graph_of)
    from served_llama import ENGINE_KINDS, engine_over_llama

    return engine_over_llama(kind, rows, name, args, device, parts) if kind in ENGINE_KINDS else None


def launched(engine, device, count):
    """Runs the engine until ``count`` steps were launched: the seconds of each call, and how many it launched."""
    end = device.launches + count
    while device.launches < end:
        before, start = device.launches, time.perf_counter()
        engine.step()
        yield time.perf_counter() - start, max(device.launches - before, 1)


def measured(model, kind, rows, name, args):
    """The row of one engine, kind and number of requests."""
    parts, device = Parts(), Device(args)
    random.seed(0)
    with nodes_on_host(parts.around) if args.device == "cpu" else nullcontext():
        engine = engine_of(model, kind, rows, name, args, device, parts)
    if engine is None:
        return None
    builder = engine.builder
    wrap_parts(builder, parts.around)
    if args.pieces:
        wrap_pieces(builder, parts.around)
    builder.build, builder.run_ahead = (parts.around(call, "build") for call in (builder.build, builder.run_ahead))
    for _ in launched(engine, device, WARM_UP):
        pass
    parts.clear()
    walls = []
    for seconds, steps in launched(engine, device, args.steps):
        walls.append(seconds / steps)
        parts.end_step(steps)
    table, ours = parts.table(), parts.sums(OF_ATTNCORE)
    device.times = []
    for _ in launched(engine, device, 0 if args.device == "cpu" else max(args.steps // 4, 10)):
        pass
    device_ms = device.median_ms()
    step_ms = 1000 * statistics.median(walls)
    if args.device == "cpu":  # the step without what evicts its caches, and without the nodes that NumPy runs
        step_ms = device_ms + parts.sums({*table} - {"wait", "launch"})["median"] / 1000
    row = {
        "model": model, "kind": kind, "rows": rows, "backend": name, "transport": builder.transport,
        "parts_us": table, "attncore_us": ours, "device_ms": round(device_ms, 4), "step_ms": round(step_ms, 4),
        "wall_over_device": round(step_ms / device_ms, 4),
    }  # fmt: skip
    engine.close()
    return row


def told(row):
    """A row as lines of text."""
    yield f"{row['model']}, {row['kind']}, {row['rows']} requests, {row['backend']}, transport {row['transport']}"
    for name, found in {**row["parts_us"], "attncore": row["attncore_us"]}.items():
        if name != "wait":
            yield f"  {name:10} {found['median']:9.1f} {found['p90']:9.1f} {found['p99']:9.1f}"
    yield f"  wall / device: {row['step_ms']:.3f} / {row['device_ms']:.3f} ms = {row['wall_over_device']:.3f}"


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--rows", default="1,64,256", help="how many requests decode")
    add("--backends", help="of flash and flashinfer, on CUDA (default: flash,flashinfer)")
    add("--models", help="of standin and llama (default: both where transformers is there, on a CPU the first)")
    add("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    add("--steps", type=int, default=300)
    add("--device-ms", type=float, default=3.0, help="how long the stand-in's model runs")
    add("--context", type=int, default=2048, help="tokens of a request before it is measured")
    add("--ahead", type=int, default=8, help="steps that the engine launches before it reads the last ones (0: none)")
    add("--fields", default="columns", choices=("columns", "functions"), help="how the stand-in has fields of its own")
    add("--evict-mib", type=int, default=320, help="what is written between steps on a CPU; 0: caches stay")
    add("--transport", help="of the builder (default: auto)")
    add("--pieces", action="store_true", help="clocks inside of build, too")
    add("--save", type=Path, help="the result file, JSON")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu shows a trend")
    args.transport = args.transport or ("graph" if on_cpu else "auto")
    args.backends = args.backends or ("planless" if on_cpu else "flash,flashinfer")
    if args.models is None:
        args.models = "standin" if on_cpu or not has_transformers() else "standin,llama"
    if unknown := set(args.kinds.split(",")) - {*KINDS}:
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    return args


def has_transformers():
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def main(argv):
    args, failed = arguments(argv), False
    if args.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other would be measured
    found = {"machine": machine(), "options": {name: str(value) for name, value in vars(args).items()}, "rows": []}
    print(found["machine"], "microseconds: median, p90, p99", sep="\n", flush=True)
    for model in args.models.split(","):
        for name in args.backends.split(","):
            for kind in args.kinds.split(","):
                for rows in map(int, args.rows.split(",")):
                    try:
                        row = measured(model, kind, rows, name, args)
                    except Exception as error:  # a kind that a machine or a library has not is a fact to report, too
                        print(f"{model}, {kind}, {rows} requests, {name}: {type(error).__name__}: {error}", flush=True)
                        failed = True
                        continue
                    if row is not None:
                        found["rows"].append(row)
                        print(*told(row), sep="\n", flush=True)
                        if args.save:
                            args.save.parent.mkdir(parents=True, exist_ok=True)
                            args.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
