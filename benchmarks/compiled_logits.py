"""Logits of compiled layers beside those of eager ones, both in bfloat16, against the same model in float32.

    python benchmarks/compiled_logits.py [--backends flash,flashinfer] [--save FILE]

A Llama with random weights, of about 1B parameters. Prompts run in one step, then tokens that are drawn, one a request
and step, so that every model sees the same. The float32 logits are of transformers' own attention, without a cache.
``error`` is the root mean square of the differences to these, by that of the logits; ``apart`` the same of the
compiled ones' differences to the eager ones'. Rounding makes both errors; exit code 1 where compiled code makes more
than 1.1 times eager's.

``--device cpu --tiny`` tries the code without a GPU, all in float32.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
from gpu import machine  # noqa: E402
from transformers_gpu import drawn, free_memory, model_of  # noqa: E402
from worker import Worker  # noqa: E402

from attncore.integrations.transformers import attncore_context  # noqa: E402

LENGTHS, TINY_LENGTHS, STEPS = (600, 33, 257, 1, 1024, 128, 512, 90), (5, 1, 12), 4
GOAL = 1.1


def texts_of(args, vocab_size):
    """Tokens of each request: a prompt, and one more for each step of decodes."""
    lengths = TINY_LENGTHS if args.tiny else LENGTHS
    return drawn([length + STEPS for length in lengths], vocab_size, seed=3)


@torch.inference_mode()
def exact_logits(model, texts):
    """float32 (requests, STEPS + 1, vocabulary)."""
    model.set_attn_implementation("sdpa")
    rows = []
    for text in texts:
        ids = torch.tensor([text], device=model.device)
        rows.append(model(ids, use_cache=False, logits_to_keep=STEPS + 1).logits[0].float().cpu())
    return torch.stack(rows)


@torch.inference_mode()
def paged_logits(model, texts, backend, compiled):
    """The same over attncore's caches, of the model's dtype."""
    size, longest = 256 if backend == "flash" else 16, max(map(len, texts))
    worker = Worker(
        model, num_blocks=len(texts) * -(-longest // size) + 1, max_num_reqs=len(texts), max_model_len=longest,
        max_num_batched_tokens=sum(map(len, texts)), block_size=size, backend=backend, graph_sizes=(), mixed_sizes=(),
        compile=compiled,
    )  # fmt: skip
    free = iter(range(1, worker.num_blocks))
    for name, text in enumerate(texts):
        worker._add(name, text, [next(free) for _ in range(-(-len(text) // size))], 0, 0.0, name + 1)
    rows = [[None] * (STEPS + 1) for _ in texts]
    for step in range(STEPS + 1):
        counts = {name: 1 if step else len(text) - STEPS for name, text in enumerate(texts)}
        metadata = worker.builder.build(counts)
        with attncore_context(metadata, worker.caches):
            logits = worker.logits(metadata.input_ids, metadata.positions, metadata.logits_indices)
        for name, row in zip(metadata.req_ids, logits.float().cpu(), strict=True):
            rows[name][step] = row
    worker.close()
    return torch.stack([torch.stack(row) for row in rows])


def measured(args):
    model = model_of(args)
    texts = texts_of(args, model.config.vocab_size)
    wide = model_of(args)
    wide.load_state_dict(model.state_dict())
    exact = exact_logits(wide.float(), texts)
    del wide
    free_memory(args)
    scale = exact.square().mean().sqrt()

    def error(a, b):
        return float((a - b).square().mean().sqrt() / scale)

    for backend in args.backends.split(","):
        eager, compiled = (
            paged_logits(model, texts, backend, compiled) for compiled in (False, {"backend": args.compiler})
        )
        row = {
            "backend": backend, "logits": exact.shape[0] * exact.shape[1], "eager_error": error(eager, exact),
            "compiled_error": error(compiled, exact), "apart": error(compiled, eager),
            "same_best": float((eager.argmax(-1) == compiled.argmax(-1)).float().mean()),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row
        free_memory(args)


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true")
    add("--backends", default="flash,flashinfer", help="of flash, flashinfer, rocm, reference")
    add("--compiler", default="inductor", help="backend of torch.compile")
    add("--save", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the code")
    return args


def main(words=None):
    args = arguments(words)
    rows = list(measured(args))
    if args.save:
        args.save.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return any(row["compiled_error"] > GOAL * row["eager_error"] + 1e-6 for row in rows)


if __name__ == "__main__":
    sys.exit(main())
