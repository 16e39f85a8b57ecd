"""examples/engine.py beside transformers' own continuous batching: the same model, requests and device, one process.

    python benchmarks/transformers_gpu.py [--trace FILE] [--backends flashinfer,flash] [--compile] [--save FILE]

A Llama of about 1B parameters with random weights in bfloat16; prompts as long as the trace's, their tokens drawn; 64
requests at a time. Tokens per second count from the first request's start to the last one's end, set-up and captures
apart on both sides; both warm up first, with other tokens in prompts of the same lengths. ``--tiny --device cpu`` tries
the code without a GPU; its figures mean nothing. Exit code 1 where a goal is missed: 1.5 times the tokens per second of
``generate_batch``, with ``--compile`` twice as many; attncore's share of a step under 2 %, the library's plan apart.

Of attncore a step's share counts the build without the library's plan and the engine's own fields, ``metadata.replay``
without the launch of the graph, what the batch is told (requests that come and go, blocks), and entering and leaving
``attncore_context``. What it does not count: in steps with prefills, of which ``eager_steps`` run in no graph at all,
each layer's way from the model, or from a graph, to ``impl.forward`` and the Python around the library's calls there,
which cannot be told apart from them.

Host time a step, on both sides: ``prepare_us_a_step`` is the scheduler and everything until the model may run (ours
with the plan), ``update_us_a_step`` the bookkeeping of its tokens; in that of ``generate_batch``, which may run ahead
of the device, a wait for it may be part. ``step_ms`` is the wall time by the number of steps.
"""

import argparse
import functools
import gc
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
import engine as example  # noqa: E402
import worker  # noqa: E402
from builder_insides import assembly, use_plan  # noqa: E402
from clocks import ClockedContext, ClockedGraph, Clocks  # noqa: E402
from gpu import machine  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, logging  # noqa: E402
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor  # noqa: E402

OF_ATTNCORE = ("commit", "replay", "batch", "context")
WARM_UP = 8
TOKENS_GOAL, COMPILED_TOKENS_GOAL, SHARE_GOAL = 1.5, 2, 0.02


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
    from attncore.replay.traces import synthetic
    from attncore.replay.traces.read_trace import read_trace

    trace = read_trace(args.trace, args.requests) if args.trace else synthetic.synthetic_trace(args.requests, 0)
    longest = 200 if args.tiny else 8192
    return drawn([min(request.prompt_tokens, longest) for request in trace.requests], vocab_size, seed=0)


def drawn(lengths, vocab_size, seed):
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def warm_up_of(prompts, vocab_size):
    """Prompts as long as the first few, of other tokens: nothing of theirs is found in a prefix cache afterwards."""
    return drawn([len(prompt) for prompt in prompts[:WARM_UP]], vocab_size, seed=1)


class Timed(example.Engine):
    """The engine, with clocks around what it calls of attncore, and around what is not attncore's inside of that."""

    def __init__(self, *args, **options):
        self.clocks = Clocks()
        self.clear()
        super().__init__(*args, **options)
        clocked = self.clocks.around
        for owner, names, clock in (
            (self.builder, ("build", "run_ahead"), "build"),
            (assembly(self.builder), ("replay",), "replay and launch"),
            (self.backend, ("plan",), "plan"),
            (self.input_ids, ("give",), "fields"),
            (self.sampled, ("fetch",), "fields"),
            (self.batch, ("add_request", "append_blocks", "remove_request"), "batch"),
            (self, ("_schedule",), "schedule"),
            (self, ("_book",), "update"),
        ):
            for name in names:
                setattr(owner, name, clocked(getattr(owner, name), clock))
        use_plan(self.builder, self.backend.plan)
        for graphs in (self.graphs, self.whole):
            graphs.update((size, ClockedGraph(graph, self.clocks)) for size, graph in graphs.items())
        self.clear()

    def clear(self):
        self.clocks.seconds.clear()
        self.steps, self.eager_steps, self.reused, self.num_steps, self.seconds = [], 0, 0, 0, 0.0

    def spent(self):
        """Seconds by name, what is inside of something else taken out of it."""
        spent = self.clocks
        return {
            "commit": spent["build"] - spent["plan"],
            "replay": spent["replay and launch"] - spent["launch"],
            "prepare": spent["schedule"] + spent["build"],
            **{name: spent[name] for name in ("plan", "fields", "batch", "context", "update")},
        }

    def _forward(self, metadata):
        self.eager_steps += not any(mixed.holds(metadata) for mixed in self.mixed)
        return super()._forward(metadata)

    def _launch(self, run):
        super()._launch(run)
        self.num_steps += run.num_steps

    def _admit(self, request):
        admitted = super()._admit(request)
        self.reused += request.computed if admitted else 0
        return admitted

    def step(self):
        start, before = time.perf_counter(), self.num_steps
        finished = super().step()
        self.seconds += (taken := time.perf_counter() - start)
        count = self.num_steps - before
        self.steps += [taken / max(count, 1)] * count
        return finished


def ours(model, prompts, args, backend):
    longest = max(map(len, prompts)) + args.new
    size = 256 if backend == "flash" else 16  # what flash-attn 2 has
    engine = Timed(
        model, num_blocks=args.pool_tokens // size + 1, max_num_reqs=args.concurrent, max_model_len=longest + 1,
        max_num_batched_tokens=args.budget, block_size=size, backend=backend, compile=args.compile,
    )  # fmt: skip
    engine.complete(warm_up_of(prompts, model.config.vocab_size), 4)  # kernels are compiled, allocations made
    engine.clear()
    with mock.patch.object(worker, "attncore_context", functools.partial(ClockedContext, engine.clocks)):
        start = time.perf_counter()
        outputs = engine.complete(prompts, args.new)
        wall = time.perf_counter() - start
    steps, spent = engine.num_steps, engine.spent()
    row = {
        "who": f"attncore engine, {engine.choice.name} {engine.choice.variant}".strip() + ", compiled" * args.compile,
        "block_size": engine.block_size,
        "tokens_per_s": sum(map(len, outputs)) / wall,
        "wall_s": wall,
        "steps": steps,
        "eager_steps": engine.eager_steps,
        "step_ms": 1e3 * wall / steps,
        "step_ms_median": 1e3 * statistics.median(engine.steps),
        "prepare_us_a_step": 1e6 * spent["prepare"] / steps,
        "update_us_a_step": 1e6 * spent["update"] / steps,
        "build_commit_us_a_step": 1e6 * spent["commit"] / steps,
        "replay_us_a_step": 1e6 * spent["replay"] / steps,
        "batch_us_a_step": 1e6 * spent["batch"] / steps,
        "context_us_a_step": 1e6 * spent["context"] / steps,
        "plan_us_a_step": 1e6 * spent["plan"] / steps,
        "engine_fields_us_a_step": 1e6 * spent["fields"] / steps,
        "share_of_attncore": sum(spent[name] for name in OF_ATTNCORE) / engine.seconds,
        "preemptions": engine.preemptions,
        "tokens_from_prefixes": engine.reused,
    }
    return row, outputs, engine


def theirs(model, prompts, args, name, **options):
    model.set_attn_implementation(options.pop("attention", args.theirs))
    settings = {"max_requests_per_batch": args.concurrent, **options}
    if args.tiny:  # its default cache is most of the machine's memory, which takes a CPU a minute to write
        settings |= {"block_size": 16, "num_blocks": args.pool_tokens // 16, "max_batch_tokens": args.budget}

    def generated(prompts, new, **more):
        return model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            **more,
        )

    generated(warm_up_of(prompts, model.config.vocab_size), 4)
    clocks = Clocks()
    with (
        clocked_method(clocks, "prepare_next_batch", "prepare"),
        clocked_method(clocks, "update_batch", "update"),
    ):
        start = time.perf_counter()
        try:
            answers = generated(prompts, args.new, record_timestamps=True, persistent_manager=True)
            wall = time.perf_counter() - start
            steps = model.init_continuous_batching().current_batch  # of the manager that ran, which is kept
        finally:
            model.destroy_cached_continuous_batching_manager()
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    starts, ends = zip(*(answer.lifespan for answer in answers.values()), strict=True)
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    row = {
        "who": f"generate_batch, {name}",
        "tokens_per_s": tokens / (max(ends) - min(starts)),
        "wall_s": max(ends) - min(starts),
        "wall_with_set_up_s": wall,
        "requests": len(answers),
        "steps": steps,
        "step_ms": 1e3 * (max(ends) - min(starts)) / steps,
        "prepare_us_a_step": 1e6 * clocks["prepare"] / steps,
        "update_us_a_step": 1e6 * clocks["update"] / steps,
    }
    stamps = sorted({stamp for answer in answers.values() for stamp in answer.timestamps or ()})
    gaps = [b - a for a, b in itertools.pairwise(stamps) if b - a > 2e-4]  # tokens of one step are stamped in turn
    if gaps:
        row["token_gap_ms_median"] = 1e3 * statistics.median(gaps)
    return row, [by_prompt.get(tuple(prompt), []) for prompt in prompts]


def clocked_method(clocks, name, clock):
    """A clock around a method of the processor that runs the steps of ``generate_batch``."""
    return mock.patch.object(
        ContinuousBatchProcessor, name, clocks.around(getattr(ContinuousBatchProcessor, name), clock)
    )


def agreement(ours, others):
    """The part of output tokens that agree until the first that does not: with random weights in bfloat16 ties part."""
    same = total = 0
    for one, other in zip(ours, others, strict=True):
        total += len(one)
        same += next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / max(total, 1)


def free_memory(args):
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def arguments():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tiny", action="store_true")
    add("--trace")
    add("--backends", default="flashinfer")
    add("--compile", action="store_true", help="layers of the engine's model are compiled")
    add("--theirs", default="sdpa", help="attention implementation of generate_batch")
    add(
        "--ways",
        help="of generate_batch, separated by ;: defaults, graphs on, flash-attn 2, or with graphs; all if left",
    )
    add("--requests", type=int, default=192)
    add("--concurrent", type=int, default=64)
    add("--new", type=int, default=128)
    add("--budget", type=int, default=4096)
    add("--pool-tokens", type=int, default=400_000)
    add("--save")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --tiny tries the code")
    return args


def rows_of_ours(model, prompts, args, said):
    """A row for each backend of the engine, printed; ``said`` gets the outputs."""
    for backend in args.backends.split(","):
        row, outputs, engine = ours(model, prompts, args, backend)
        row["agrees_with"] = {other: agreement(output, outputs) for other, output in said.items()}
        said[backend] = outputs
        print(json.dumps(row), flush=True)
        engine.close()
        del engine
        free_memory(args)
        yield row


def rows_of_theirs(model, prompts, args, said):
    """A row for each way to run ``generate_batch``, printed; ``said`` gets the outputs."""
    variants = {"defaults": {}}
    if args.device == "cuda":
        variants["graphs on"] = {"use_cuda_graph": True}
        variants["flash-attn 2"] = {"attention": "flash_attention_2"}
        variants["flash-attn 2, graphs on"] = {"attention": "flash_attention_2", "use_cuda_graph": True}
    for name, options in variants.items():
        if args.ways and name not in args.ways.split(";"):
            continue
        try:
            row, outputs = theirs(model, prompts, args, name, **options)
        except Exception as error:  # its failure is a fact to report, too
            row, outputs = {"who": f"generate_batch, {name}", "error": f"{type(error).__name__}: {error}"}, None
        if outputs is not None:
            row["agrees_with"] = {other: agreement(output, outputs) for other, output in said.items()}
            said[row["who"]] = outputs
        free_memory(args)
        print(json.dumps(row), flush=True)
        yield row


def goals_of(rows):
    """What the goals are about, for each row of ours."""
    measured = [row["tokens_per_s"] for row in rows if row["who"].startswith("generate_batch") and "error" not in row]
    return {
        row["who"]: {
            "times_generate_batch": row["tokens_per_s"] / max(measured) if measured else None,
            "share_of_attncore": row["share_of_attncore"],
        }
        for row in rows
        if "share_of_attncore" in row
    }


def main():
    args = arguments()
    logging.set_verbosity_error()
    logging.get_logger("ContinuousBatchingLogger").setLevel("ERROR")  # it warns that a manager is kept
    model = model_of(args)
    prompts = prompts_of(args, model.config.vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    said = {}
    rows = [*rows_of_ours(model, prompts, args, said), *rows_of_theirs(model, prompts, args, said)]
    goals = goals_of(rows)
    tokens_goal = COMPILED_TOKENS_GOAL if args.compile else TOKENS_GOAL
    missed = [
        who
        for who, found in goals.items()
        if found["share_of_attncore"] >= SHARE_GOAL or not (found["times_generate_batch"] or 0) >= tokens_goal
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
