"""examples/engine.py beside transformers' own continuous batching: the same model, requests and device, one process.

    python benchmarks/transformers_gpu.py [--trace FILE] [--backends flashinfer,flash] [--save FILE]

A Llama of about 1B parameters with random weights in bfloat16; prompts as long as the trace's, their tokens drawn; 64
requests at a time. Tokens per second count from the first request's start to the last one's end, set-up and captures
apart on both sides. ``--tiny --device cpu`` tries the code without a GPU; its figures mean nothing. Exit code 1 where
a goal is missed: 1.5 times the tokens per second of ``generate_batch``, attncore's share of a step under 2 %, the
library's plan apart.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
from engine import Engine  # noqa: E402
from gpu import machine  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, logging  # noqa: E402

TOKENS_GOAL, SHARE_GOAL = 1.5, 0.02


def model_of(args):
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 16384}
    if args.tiny:
        shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(args.device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    torch.set_default_dtype(before)
    return model


def prompts_of(args, vocab_size):
    from attncore.replay import synthetic
    from attncore.replay.traces import read_trace

    trace = read_trace(args.trace, args.requests) if args.trace else synthetic.synthetic_trace(args.requests, 0)
    draw = random.Random(0)
    longest = 200 if args.tiny else 8192
    lengths = [min(request.prompt_tokens, longest) for request in trace.requests]
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


class Timed(Engine):
    """The engine, with clocks around builds, and around the plan and the engine's own fields inside them."""

    def __init__(self, *args, **options):
        self.clear()
        super().__init__(*args, **options)
        for owner, name in ((self.builder, "build"), (self.backend, "plan")):
            setattr(owner, name, self.clocked(getattr(owner, name), name))
        self.builder._backends.plans = tuple((group, self.backend.plan) for group, _ in self.builder._backends.plans)

    def clear(self):
        self.spent, self.steps = dict.fromkeys(("build", "plan", "fields"), 0.0), []

    def clocked(self, call, name):
        def timed(*args, **options):
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.spent[name] += time.perf_counter() - start

        return timed

    def _fill_input_ids(self, metadata, out):
        self.clocked(super()._fill_input_ids, "fields")(metadata, out)

    def _fill_temperature(self, metadata, out):
        self.clocked(super()._fill_temperature, "fields")(metadata, out)

    def step(self):
        start = time.perf_counter()
        finished = super().step()
        self.steps.append(time.perf_counter() - start)
        return finished


def ours(model, prompts, args, backend):
    longest = max(map(len, prompts)) + args.new
    size = 256 if backend == "flash" else 16  # what flash-attn 2 has
    engine = Timed(
        model, num_blocks=args.pool_tokens // size + 1, max_num_reqs=args.concurrent, max_model_len=longest + 1,
        max_num_batched_tokens=args.budget, block_size=size, backend=backend,
    )  # fmt: skip
    engine.generate(prompts[:8], 4)  # kernels are compiled, allocations made
    engine.clear()
    start = time.perf_counter()
    outputs = engine.generate(prompts, args.new)
    wall = time.perf_counter() - start
    steps, spent = len(engine.steps), engine.spent
    share = (spent["build"] - spent["plan"] - spent["fields"]) / sum(engine.steps)
    row = {
        "who": f"attncore engine, {engine.choice.name} {engine.choice.variant}".strip(),
        "block_size": engine.block_size,
        "tokens_per_s": sum(map(len, outputs)) / wall,
        "wall_s": wall,
        "steps": steps,
        "step_ms_median": 1e3 * statistics.median(engine.steps),
        "build_commit_us_a_step": 1e6 * (spent["build"] - spent["plan"] - spent["fields"]) / steps,
        "plan_us_a_step": 1e6 * spent["plan"] / steps,
        "engine_fields_us_a_step": 1e6 * spent["fields"] / steps,
        "share_of_attncore": share,
        "preemptions": engine.preemptions,
    }
    return row, outputs, engine


def theirs(model, prompts, args, name, **options):
    model.set_attn_implementation(options.pop("attention", args.theirs))
    start = time.perf_counter()
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=args.new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=args.concurrent, **options),
        record_timestamps=True,
    )
    wall = time.perf_counter() - start
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    starts, ends = zip(*(answer.lifespan for answer in answers.values()), strict=True)
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    row = {
        "who": f"generate_batch, {name}",
        "tokens_per_s": tokens / (max(ends) - min(starts)),
        "wall_s": max(ends) - min(starts),
        "wall_with_set_up_s": wall,
        "requests": len(answers),
    }
    stamps = sorted({stamp for answer in answers.values() for stamp in answer.timestamps or ()})
    gaps = [b - a for a, b in itertools.pairwise(stamps) if b - a > 2e-4]  # tokens of one step are stamped in turn
    if gaps:
        row["step_ms_median"] = 1e3 * statistics.median(gaps)
    return row, [by_prompt.get(tuple(prompt), []) for prompt in prompts]


def agreement(ours, others):
    """The part of output tokens that agree until the first that does not: with random weights in bfloat16 ties part."""
    same = total = 0
    for one, other in zip(ours, others, strict=True):
        total += len(one)
        same += next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / max(total, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--tiny", action="store_true")
    add("--trace")
    add("--backends", default="flashinfer")
    add("--theirs", default="sdpa", help="attention implementation of generate_batch")
    add("--requests", type=int, default=192)
    add("--concurrent", type=int, default=64)
    add("--new", type=int, default=128)
    add("--budget", type=int, default=4096)
    add("--pool-tokens", type=int, default=400_000)
    add("--save")
    args = parser.parse_args()
    logging.set_verbosity_error()
    model = model_of(args)
    prompts = prompts_of(args, model.config.vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows, said = [], {}
    for backend in args.backends.split(","):
        row, outputs, engine = ours(model, prompts, args, backend)
        row["agrees_with"] = {other: agreement(output, outputs) for other, output in said.items()}
        said[backend] = outputs
        rows.append(row)
        print(json.dumps(row), flush=True)
        del engine
        if args.device == "cuda":
            torch.cuda.empty_cache()
    variants = {"defaults": {}}
    if args.device == "cuda":
        variants["graphs on"] = {"use_cuda_graph": True}
        variants["flash-attn 2"] = {"attention": "flash_attention_2"}
        variants["flash-attn 2, graphs on"] = {"attention": "flash_attention_2", "use_cuda_graph": True}
    for name, options in variants.items():
        try:
            row, outputs = theirs(model, prompts, args, name, **options)
        except Exception as error:  # its failure is a fact to report, too
            row, outputs = {"who": f"generate_batch, {name}", "error": f"{type(error).__name__}: {error}"}, None
        if outputs is not None:
            row["agrees_with"] = {other: agreement(output, outputs) for other, output in said.items()}
            said[row["who"]] = outputs
        if args.device == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
    measured = [row["tokens_per_s"] for row in rows if row["who"].startswith("generate_batch") and "error" not in row]
    goals = {
        row["who"]: {
            "times_generate_batch": row["tokens_per_s"] / max(measured) if measured else None,
            "share_of_attncore": row["share_of_attncore"],
        }
        for row in rows
        if "share_of_attncore" in row
    }
    missed = [
        who
        for who, found in goals.items()
        if found["share_of_attncore"] >= SHARE_GOAL or not (found["times_generate_batch"] or 0) >= TOKENS_GOAL
    ]
    found = {
        "machine": machine(), "parameters": parameters, "requests": len(prompts), "concurrent": args.concurrent,
        "new_tokens": args.new, "prompt_tokens": sum(map(len, prompts)), "attention_of_generate_batch": args.theirs,
        "trace": Path(args.trace).name if args.trace else "synthetic", "rows": rows, "goals": goals, "missed": missed,
    }  # fmt: skip
    if args.save:
        Path(args.save).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(goals, indent=1))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
