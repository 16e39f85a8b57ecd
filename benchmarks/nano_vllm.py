"""nano-vllm's own metadata beside attncore's, in nano-vllm: the same model, requests and device, one process.

    python benchmarks/nano_vllm.py CHECKOUT [--sizes 64,256,512] [--save FILE]
    python benchmarks/nano_vllm.py CHECKOUT --host-only

CHECKOUT is a clone of github.com/GeeeekExplorer/nano-vllm, of which nothing is kept here. Its ``ModelRunner`` makes
each step's tensors in ``prepare_prefill``, ``prepare_decode`` and ``prepare_sample``. Way ``attncore`` replaces
these three at run time by an InputBatch and a MetadataBuilder; scheduler, blocks, model, graphs and sampler stay.

Way ``none`` is the floor (``nano_floor``): the host sends the tokens that were sampled, and nothing else.

A Qwen3 of about 0.6B parameters with random weights; as many requests as a size says, all at once. A row for each size
and way: ``tokens_per_s`` from the first decode step to the last, ``gap_us`` the median time from the tokens of one step
to the launch of the next one's model, in which the device has nothing to do, ``prepare_us`` the part of it that the
three functions take, ``model_us`` the median time from there to the tokens, ``ratio`` of tokens a second beside those
of nano-vllm's. ``agrees`` is the part of all tokens that come before the first that differs from nano-vllm's first run:
the most likely token is taken, but logits in bfloat16 have ties, among which what is drawn for a row decides, and rows
stand in another order. ``again`` is the same of nano-vllm's second run. Before that a run, ``compared``, makes every
step in both ways and compares what is on the device: ``differs`` names what differs.

``--host-only`` needs no GPU, and neither flash-attn nor xxhash: stand-ins take the place of what is not installed. The
scheduler runs with tokens that are drawn in place of a model's; both ways make each step, the arrays are compared, and
a row has the medians of ``prepare_decode`` and of attncore's step, in tensors on the CPU. Exit code 1 where arrays
differ.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu import machine
from nano_checkout import LONGEST, SIZE, Nano, draw_weights, make_model
from nano_floor import Floor
from nano_metadata import Metadata

import attncore

GREEDY = 1e-5
"""nano-vllm refuses 0."""


def drawn_prompts(count, length, seed=0):
    """Prompts around ``length`` tokens; every fourth begins as the one before it, so that blocks are shared."""
    numbers, prompts = random.Random(seed), []
    for index in range(count):
        prompt = [numbers.randrange(10000) for _ in range(numbers.randint(length // 2, 3 * length // 2))]
        prompts.append([*prompts[-1][: 2 * SIZE], *prompt] if index % 4 == 3 else prompt)
    return prompts


def differences(theirs, ours, inputs, ours_inputs, rows):
    """Names of what differs between the contexts of a step, as far as a kernel reads it."""
    pairs = {"input_ids": (inputs[0], ours_inputs[0]), "positions": (inputs[1], ours_inputs[1])}
    for name in ("is_prefill", "max_seqlen_q", "max_seqlen_k", "slot_mapping"):
        pairs[name] = getattr(theirs, name), getattr(ours, name)
    names = ("cu_seqlens_q", "cu_seqlens_k") if theirs.is_prefill else ("context_lens",)
    pairs |= {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
    for name, (one, other) in pairs.items():
        if not np.array_equal(np.asarray(one), np.asarray(other)):
            yield name
    if (theirs.block_tables is None) != (ours.block_tables is None):
        yield "block_tables"
    elif theirs.block_tables is not None:
        one, other = np.asarray(theirs.block_tables), np.asarray(ours.block_tables)
        lens = theirs.cu_seqlens_k.diff() if theirs.is_prefill else theirs.context_lens
        held = np.arange(one.shape[1]) < -(-np.asarray(lens)[:, None] // SIZE)
        if rows != len(other) or not np.array_equal(one[held], other[:, : one.shape[1]][held]):
            yield "block_tables"


def host_row(nano, size, args):
    """The scheduler with drawn tokens; each step made both ways, and compared."""
    longest = args.prompt * 3 // 2 + 2 * SIZE + args.new
    blocks = size * -(-longest // SIZE) // 2 + 2 * -(-longest // SIZE)  # few, so that some are preempted
    config = types.SimpleNamespace(
        max_num_seqs=size,
        max_num_batched_tokens=args.budget,
        eos=-1,
        kvcache_block_size=SIZE,
        num_kvcache_blocks=blocks,
    )
    scheduler, runner = nano.scheduler.Scheduler(config), nano.host_runner()
    nano.without_block_0(scheduler.block_manager)
    host = attncore.Host.assume("cpu")
    backend = attncore.select(
        num_heads=16, num_kv_heads=8, head_size=128, dtype="float32", block_size=SIZE, backend="reference", host=host
    ).create()
    ours = Metadata(
        nano, backend, max_num_seqs=size, max_model_len=longest + 1, max_num_batched_tokens=args.budget,
        num_blocks=blocks,
    )  # fmt: skip
    ours.follow(scheduler.block_manager)
    for prompt in drawn_prompts(size, args.prompt):
        params = nano.sampling_params(temperature=0.6, ignore_eos=True, max_tokens=args.new)
        scheduler.add(nano.sequence.Sequence(prompt, params))
    times, wrong, numbers = {"theirs": [], "ours": []}, set(), random.Random(1)
    steps = {"prefill": 0, "decode": 0, "preempted": 0}
    preempt = scheduler.preempt

    def counted(seq):
        steps["preempted"] += 1
        preempt(seq)

    scheduler.preempt = counted
    while not scheduler.is_finished():
        seqs, is_prefill = scheduler.schedule()
        kind = "prefill" if is_prefill else "decode"
        steps[kind] += 1
        start = time.perf_counter()
        inputs = getattr(ours, f"prepare_{kind}")(seqs)
        temperatures = ours.prepare_sample(seqs)
        middle = time.perf_counter()
        context = nano.get_context()
        start_theirs = time.perf_counter()
        expected = getattr(runner, f"prepare_{kind}")(seqs)  # in our order
        expected_temperatures = runner.prepare_sample(seqs)
        end = time.perf_counter()
        wrong |= {f"{kind}: {name}" for name in differences(nano.get_context(), context, expected, inputs, len(seqs))}
        if not torch.equal(temperatures, expected_temperatures):
            wrong.add(f"{kind}: temperatures")
        tokens = [numbers.randrange(10000) for _ in seqs]
        before = time.perf_counter()
        ours.sampled(tokens)
        told = time.perf_counter() - before
        if not is_prefill and len(seqs) > size // 2:
            times["ours"].append(middle - start + told)
            times["theirs"].append(end - start_theirs)
        scheduler.postprocess(seqs, tokens, is_prefill)
    medians = {f"{way}_us": 1e6 * statistics.median(found) if found else None for way, found in times.items()}
    return {"size": size, **steps, **medians, "differs": sorted(wrong)}


class Compared:
    """A ModelRunner that prepares every step in both ways, and runs its own."""

    def __init__(self, nano, runner, ours):
        self.nano, self.steps, self.wrong, self.ours = nano, 0, set(), ours
        self.inner_run, self.sample = runner.run, runner.prepare_sample
        for kind in ("prefill", "decode"):
            setattr(runner, f"prepare_{kind}", self.both(kind, getattr(runner, f"prepare_{kind}")))
        runner.prepare_sample, runner.run = self.sampled, self.run

    def both(self, kind, prepare):
        def prepared(seqs):
            mine = [one.cpu() for one in getattr(self.ours, f"prepare_{kind}")(seqs)]
            context = on_host(self.nano.get_context())
            theirs = prepare(seqs)  # in our order
            expected = [one.cpu() for one in theirs]
            found = differences(on_host(self.nano.get_context()), context, expected, mine, len(seqs))
            self.wrong |= {f"{kind}: {name}" for name in found}
            self.steps += 1
            return theirs

        return prepared

    def sampled(self, seqs):
        theirs = self.sample(seqs)
        if not torch.equal(theirs.cpu(), self.ours.prepare_sample(seqs).cpu()):
            self.wrong.add("temperatures")
        return theirs

    def run(self, seqs, is_prefill):
        tokens = self.inner_run(seqs, is_prefill)
        self.ours.sampled(tokens)
        return tokens


def on_host(context):
    fields = {name: getattr(context, name) for name in ("is_prefill", "max_seqlen_q", "max_seqlen_k")}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "slot_mapping", "context_lens", "block_tables"):
        value = getattr(context, name)
        fields[name] = value if value is None else value.cpu()
    return types.SimpleNamespace(**fields)


class Timed:
    """A ModelRunner's steps: when its model is launched and when its tokens are there."""

    def __init__(self, runner, ours):
        self.inner_run, self.inner_model, self.ours = runner.run, runner.run_model, ours
        self.inner = {name: getattr(ours or runner, name) for name in ("prepare_decode", "prepare_prefill")}
        self.sample = (ours or runner).prepare_sample
        self.told, self.gaps, self.prepared, self.models, self.decodes = None, [], [], [], []
        runner.run, runner.run_model = self.run, self.run_model
        for name, prepare in self.inner.items():
            setattr(runner, name, self.clocked(prepare))
        runner.prepare_sample = self.clocked(self.sample, more=True)

    def clocked(self, prepare, more=False):
        def timed(seqs):
            start = time.perf_counter()
            found = prepare(seqs)
            self.spent = time.perf_counter() - start + (self.spent if more else 0)
            return found

        return timed

    def run(self, seqs, is_prefill):
        tokens = self.inner_run(seqs, is_prefill)
        self.told = time.perf_counter()
        if self.ours is not None:
            self.ours.sampled(tokens)
        if is_prefill:
            self.told = None
        else:
            self.models.append(self.told - self.launched)
            self.decodes.append((self.told, len(tokens)))
        return tokens

    def run_model(self, input_ids, positions, is_prefill):
        self.launched = time.perf_counter()
        if not is_prefill and self.told is not None:
            self.gaps.append(self.launched - self.told)
            self.prepared.append(self.spent)
        return self.inner_model(input_ids, positions, is_prefill)


def gpu_row(nano, llm, size, way, args):
    """A size of requests to their end, on the engine that is there; its methods are as before afterwards."""
    runner, manager, config = llm.model_runner, llm.scheduler.block_manager, llm.scheduler
    ours = None
    if way in ("attncore", "compared"):
        choice = attncore.select(
            num_heads=16, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=SIZE, backend=args.backend
        )
        ours = Metadata(
            nano, choice.create("cuda"), max_num_seqs=config.max_num_seqs, max_model_len=LONGEST,
            max_num_batched_tokens=config.max_num_batched_tokens, num_blocks=len(manager.blocks),
        )  # fmt: skip
        ours.follow(manager)
    torch.manual_seed(0)
    if way == "compared":
        timed = Compared(nano, runner, ours)
    else:
        timed = Timed(runner, Floor(nano, runner) if way == "none" else ours)
    params = nano.sampling_params(temperature=GREEDY, ignore_eos=True, max_tokens=args.new)
    prompts = drawn_prompts(size, args.prompt, seed=size)
    for prompt in prompts:
        llm.add_request(prompt, params)
    outputs = {}
    while not llm.is_finished():
        for name, tokens in llm.step()[0]:
            outputs[name] = tokens
    for name in {"run", "run_model", "prepare_decode", "prepare_prefill", "prepare_sample"} & vars(runner).keys():
        delattr(runner, name)
    if ours is not None:
        del manager.deallocate
        ours.builder.close()
    manager.hash_to_block_id.clear()  # the next run finds no prefix of this one's
    if way == "compared":
        return {"size": size, "way": way, "steps": timed.steps, "differs": sorted(timed.wrong)}, None
    whole = [(at, count) for at, count in timed.decodes if count == size] or timed.decodes
    seconds = whole[-1][0] - whole[0][0]
    row = {
        "size": size, "way": way, "decode_steps": len(timed.decodes),
        "tokens_per_s": sum(count for _, count in whole[1:]) / seconds,
        "step_ms": 1e3 * seconds / max(len(whole) - 1, 1),
        "gap_us": 1e6 * statistics.median(timed.gaps), "prepare_us": 1e6 * statistics.median(timed.prepared),
        "model_us": 1e6 * statistics.median(timed.models),
    }  # fmt: skip
    return row, [outputs[name] for name in sorted(outputs)]


def agreement(ours, others):
    """The part of all tokens that come before a sequence's first that differs."""
    same = total = 0
    for one, other in zip(ours, others, strict=True):
        total += len(one)
        same += next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return same / max(total, 1)


def gpu_rows(nano, sizes, args):
    """Rows of every size, each way three times in turn; the best of them."""
    llm_class = importlib.import_module("nanovllm.llm").LLM
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, args.tiny)
        llm = llm_class(
            folder, enforce_eager=False, max_model_len=LONGEST, max_num_seqs=512, max_num_batched_tokens=args.budget
        )
        draw_weights(llm.model_runner.model)
        nano.without_block_0(llm.scheduler.block_manager)
        for size in sizes:
            best, said = {}, {}
            for way in ("compared", *3 * ("nano-vllm", "attncore", "none")):  # the first one warms up
                row, outputs = gpu_row(nano, llm, size, way, args)
                if way == "compared":
                    yield row
                    continue
                if way not in best or row["tokens_per_s"] > best[way]["tokens_per_s"]:
                    best[way] = row
                said.setdefault(way, []).append(outputs)
            theirs, first = best["nano-vllm"], said["nano-vllm"][0]
            yield theirs | {"again": agreement(said["nano-vllm"][1], first)}
            agrees = {"agrees": agreement(said["attncore"][0], first)}
            for way, more in (("attncore", agrees), ("none", {})):
                yield best[way] | more | {"ratio": best[way]["tokens_per_s"] / theirs["tokens_per_s"]}


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkout", metavar="CHECKOUT", help="a folder with a clone of nano-vllm")
    add("--host-only", action="store_true", help="no GPU: times prepare_decode alone, and compares arrays")
    add("--sizes", default="64,256,512", help="numbers of requests")
    add("--prompt", type=int, default=600, help="tokens of a prompt, about")
    add("--new", type=int, default=128, help="new tokens of each request")
    add("--budget", type=int, default=16384, help="tokens of a step at most")
    add("--backend", default="flash", help="whose needs attncore's metadata is built for")
    add("--tiny", action="store_true", help="two layers, on a GPU too")
    add("--save", metavar="FILE")
    return parser.parse_args(words)


def main(words=None):
    args = arguments(words)
    try:
        nano = Nano(args.checkout, host_only=args.host_only)
    except (FileNotFoundError, ImportError) as error:
        print(f"nano_vllm.py: {error}", file=sys.stderr)
        return 2
    sizes, rows = [int(size) for size in args.sizes.split(",")], []
    for row in (host_row(nano, size, args) for size in sizes) if args.host_only else gpu_rows(nano, sizes, args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.save:
        found = {
            "machine": machine(),
            "host_only": args.host_only,
            "prompt": args.prompt,
            "new": args.new,
            "rows": rows,
        }
        Path(args.save).write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row.get("differs") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
