"""Steps of decodes with a chunk of a prompt beside them: eager, and captured between attention; examples/engine.py.

    python benchmarks/mixed_steps.py [--backends flash,flashinfer] [--decodes 63] [--chunks 64,192,448] [--save FILE]

A Llama with random weights, of about 1B parameters in bfloat16. Requests decode at contexts of 600 tokens, and each
step runs a chunk of a new prompt, too. A row for each backend, number of tokens in the chunk, and of: ``eager``,
``pieces`` (captured between attention) and, where the backend's level is ``always``, ``whole`` (one graph), over layers
as they are and compiled. ``step_us`` is the median wall time of a step, its tokens read;
``host_us`` the part in which the host builds and launches it.

``--device cpu --shape tiny`` tries the code without a GPU; its figures mean nothing.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path


def whole_numbers(text):
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers, such as 64,192") from None


def parsed(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default %(default)s)")
    add("--shape", choices=("tiny", "1b"), default="1b", help="of the model (default %(default)s)")
    names = "of flash, flashinfer, rocm, reference (default %(default)s)"
    add("--backends", default="flash,flashinfer", metavar="A,B", help=names)
    add("--decodes", type=int, default=63, metavar="N", help="in every step (default %(default)s)")
    behind = "tokens that each decode has behind it at first (default %(default)s)"
    add("--context", type=int, default=600, metavar="N", help=behind)
    tokens = "tokens of the chunk beside the decodes (default 64,192,448)"
    add("--chunks", type=whole_numbers, default=[64, 192, 448], metavar="N,M", help=tokens)
    add("--rounds", type=int, default=40, metavar="N", help="steps that are timed, of each kind (default %(default)s)")
    add("--save", type=Path, metavar="FILE", help="write the machine and the rows to FILE as JSON")
    args = parser.parse_args(words)
    args.tiny = args.shape == "tiny"
    return args


if __name__ == "__main__":
    ARGS = parsed()  # first: the libraries take seconds, and may not be installed

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
from engine import Engine  # noqa: E402
from gpu import machine  # noqa: E402
from mixed_steps import MixedSteps  # noqa: E402
from transformers_gpu import drawn, free_memory, model_of  # noqa: E402


class InPieces(Engine):
    """The engine, which captures steps with prefills between attention, whatever the backend's level."""

    def _capture_mixed(self, sizes):
        self.mixed = [MixedSteps(self, size, self.batch.max_num_reqs) for size in sorted(sizes, reverse=True)]


def medians(engine, chunk, args):
    """Microseconds of a step and of its launch. The chunk's request leaves after each step."""
    for prompt in drawn([args.context] * args.decodes, engine.vocab_size, seed=1):
        engine.add_request(prompt, 4 * args.rounds)
    while engine.waiting or any(request.next > 1 for request in engine.running.values()):
        engine.step()
    times, launched, launch = [], [], engine._launch

    def timed(run):
        start = time.perf_counter()
        launch(run)
        launched.append(time.perf_counter() - start)

    engine._launch = timed
    for prompt in drawn([chunk] * (args.rounds + 3), engine.vocab_size, seed=2):
        new = engine.add_request(prompt, 2)
        if args.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start, launched[-1]))
        engine.cancel(new)
    engine._launch = launch
    for request in list(engine.running.values()):
        engine.cancel(request)
    return [1e6 * statistics.median(column) for column in zip(*times[3:], strict=True)]


def rows(model, backend, args):
    size, tokens = 256 if backend == "flash" else 16, [args.decodes + chunk for chunk in args.chunks]
    longest = args.context + 4 * args.rounds + 8
    for compiled in (False, True):
        for way in ("eager", "pieces", "whole"):
            start = time.perf_counter()
            engine = (InPieces if way == "pieces" else Engine)(
                model, num_blocks=(args.decodes + 4) * -(-longest // size) + 1, max_num_reqs=args.decodes + 1,
                max_model_len=longest, max_num_batched_tokens=4096, block_size=size, backend=backend, graph_sizes=(),
                mixed_sizes=() if way == "eager" else tuple(tokens), compile=compiled,
            )  # fmt: skip
            if way == "whole" and not engine.whole:
                engine.close()
                continue
            set_up = time.perf_counter() - start
            for chunk in args.chunks:
                step, host = medians(engine, chunk, args)
                row = {"backend": backend, "layers": "compiled" if compiled else "as they are", "way": way}
                row |= {"decodes": args.decodes, "chunk": chunk, "step_us": step, "host_us": host, "set_up_s": set_up}
                print(json.dumps(row), flush=True)
                yield row
            engine.close()
            del engine
            gc.collect()
            free_memory(args)


def main(args):
    model = model_of(args)
    found = [row for backend in args.backends.split(",") for row in rows(model, backend, args)]
    if args.save:
        args.save.write_text(json.dumps({"machine": machine(), "shape": args.shape, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(ARGS)
