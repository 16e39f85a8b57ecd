"""nano-vllm's own metadata beside attncore's, in nano-vllm: the same model, requests and device, one process.

    python benchmarks/nano_vllm.py CHECKOUT [--sizes 64,256,512] [--save FILE]
    python benchmarks/nano_vllm.py CHECKOUT --host-only

CHECKOUT is a clone of github.com/GeeeekExplorer/nano-vllm, of which nothing is kept here. Its ``ModelRunner`` makes
each step's tensors in ``prepare_prefill``, ``prepare_decode`` and ``prepare_sample``. Way ``attncore`` replaces
these three at run time by an InputBatch and a MetadataBuilder; scheduler, blocks, model, graphs and sampler stay.

A Qwen3 of about 0.6B parameters with random weights; as many requests as a size says, all at once. A row for each size
and way: ``tokens_per_s`` from the first decode step to the last, ``gap_us`` the median time from the tokens of one step
to the launch of the next one's model, in which the device has nothing to do, ``prepare_us`` the part of it that the
three functions take, ``agrees`` whether the tokens are those of the first way: same order, same seed.

``--host-only`` needs no GPU, and neither flash-attn nor xxhash: stand-ins take the place of what is not installed. The
scheduler runs with tokens that are drawn in place of a model's; both ways make each step, the arrays are compared, and
a row has the medians of ``prepare_decode`` and of attncore's step, in tensors on the CPU. Exit code 1 where arrays, or
tokens, differ.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
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

import attncore

SIZE = 256
"""Tokens of a block: flash-attn takes multiples of it."""
LONGEST = 4096
"""Tokens of a request, in both ways: tables are equally wide then, which the graphs of nano-vllm copy."""


class Metadata:
    """What ModelRunner prepares for a step, by attncore. The batch follows the sequences that the scheduler gives."""

    def __init__(self, nano, backend, *, max_num_seqs, max_model_len, max_num_batched_tokens, num_blocks):
        self.nano, self.seqs, self.in_rows, self.metadata = nano, {}, None, None
        self.batch = attncore.InputBatch(
            max_num_reqs=max_num_seqs, max_model_len=max_model_len, block_size=SIZE, num_blocks=num_blocks
        )
        self.builder = attncore.MetadataBuilder(self.batch, backend, max_num_batched_tokens=max_num_batched_tokens)
        self.input_ids = self.batch.token_column("input_ids", np.int64)
        self.temperature = self.batch.column("temperature", np.float32)
        for column in (self.input_ids, self.temperature):
            self.builder.register_column(column)

    def prepare_prefill(self, seqs):
        for seq in seqs:
            if seq.seq_id not in self.seqs:
                self.batch.add_request(seq.seq_id, seq.block_table, seq.num_cached_tokens)
                self.input_ids.give(seq.seq_id, seq.token_ids)
                self.temperature[seq.seq_id] = seq.temperature
                self.seqs[seq.seq_id] = seq
        counts = dict.fromkeys(self.seqs, 0) | {seq.seq_id: seq.num_scheduled_tokens for seq in seqs}
        step = self._built(counts, seqs)
        cached = bool(step.host.context_lens.any())
        self.nano.set_context(
            True, step.query_start_loc, step.seq_start_loc, step.max_query_len, step.max_seq_len, step.slot_mapping,
            None, step.block_table if cached else None,
        )  # fmt: skip
        return step.input_ids, step.positions

    def prepare_decode(self, seqs):
        for name in self.batch.needs_block():
            self.batch.append_blocks(name, self.seqs[name].block_table[-1:])
        step = self._built(None, seqs)
        self.nano.set_context(
            False, slot_mapping=step.slot_mapping, context_lens=step.seq_lens, block_tables=step.block_table
        )
        return step.input_ids, step.positions

    def prepare_sample(self, seqs):
        return self.metadata.temperature

    def _built(self, counts, seqs):
        """The step's metadata. Its rows stand in the batch's order, and so do ``seqs`` and their tokens then."""
        if counts is None and len(seqs) < len(self.seqs):
            counts = dict.fromkeys(self.seqs, 0) | dict.fromkeys((seq.seq_id for seq in seqs), 1)
        step = self.metadata = self.builder.build() if counts is None else self.builder.build(counts)
        if counts is not None:
            seqs[:], self.in_rows = [self.seqs[name] for name in step.req_ids], None
        else:
            if self.in_rows is None:
                self.in_rows = [self.seqs[name] for name in step.req_ids]
            seqs[:] = self.in_rows
        return step

    def sampled(self, token_ids):
        """The tokens of the last step, in the order of its rows: the next one's inputs."""
        self.input_ids.write(self.metadata, token_ids)

    def left(self, seq):
        """A sequence finished, or was preempted: its blocks go back to the pool."""
        if self.seqs.pop(seq.seq_id, None) is not None:
            self.batch.remove_request(seq.seq_id)
            self.in_rows = None

    def follow(self, manager):
        """Has ``left`` called wherever the pool takes blocks back."""
        deallocate = manager.deallocate

        def told(seq):
            self.left(seq)
            deallocate(seq)

        manager.deallocate = told


class Nano:
    """The modules of a checkout. ``host_only``: with stand-ins for what is not installed."""

    def __init__(self, checkout, *, host_only):
        if not (Path(checkout) / "nanovllm").is_dir():
            raise FileNotFoundError(f"{checkout}: no folder nanovllm in it; give a clone of nano-vllm")
        sys.path.insert(0, str(checkout))
        if host_only:
            stand_in("flash_attn", flash_attn_varlen_func=None, flash_attn_with_kvcache=None)
            stand_in("xxhash", xxh64=Hash)
        for name in ("model_runner", "scheduler", "block_manager", "sequence"):
            module = importlib.import_module(f"nanovllm.engine.{name}")
            setattr(self, name, module)
        self.context = importlib.import_module("nanovllm.utils.context")
        self.set_context, self.get_context = self.context.set_context, self.context.get_context
        self.sampling_params = importlib.import_module("nanovllm.sampling_params").SamplingParams
        self.sequence.Sequence.block_size = SIZE

    def without_block_0(self, manager):
        """attncore's null block is no request's: it is taken out of the pool, in both ways."""
        with contextlib.suppress(ValueError):
            manager.free_block_ids.remove(0)

    def host_runner(self):
        """A ModelRunner that has nothing but what its ``prepare_*`` read, and keeps tensors on the CPU."""
        runner = object.__new__(self.model_runner.ModelRunner)
        runner.block_size = SIZE

        def tensor(data, *, dtype, pin_memory):
            return torch.tensor(data, dtype=dtype)

        self.model_runner.torch = types.SimpleNamespace(
            tensor=tensor, **{name: getattr(torch, name) for name in ("int32", "int64", "float32")}
        )
        torch.Tensor.cuda = lambda self, non_blocking: self
        return runner


def stand_in(name, **attributes):
    """A module ``name`` of these attributes, unless there is one."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


class Hash:
    """In place of xxhash.xxh64."""

    def __init__(self):
        self.inner = hashlib.blake2b(digest_size=8)

    def update(self, data):
        self.inner.update(data)

    def intdigest(self):
        return int.from_bytes(self.inner.digest(), "little")


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


def make_model(folder, tiny):
    """A folder with a Qwen3's configuration and a tokenizer of a few words; no weights: the engine's are drawn."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2 if tiny else 28}
    Qwen3Config(
        **shape, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=32000 if tiny else 151936,
        max_position_embeddings=LONGEST, tie_word_embeddings=True, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


@torch.inference_mode()
def draw_weights(model):
    """Random weights in place, where the graphs read them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.05, generator=generator)


class Timed:
    """A ModelRunner's steps: when its model is launched and when its tokens are there."""

    def __init__(self, runner, ours):
        self.inner_run, self.inner_model, self.ours = runner.run, runner.run_model, ours
        self.inner = {name: getattr(ours or runner, name) for name in ("prepare_decode", "prepare_prefill")}
        self.sample = (ours or runner).prepare_sample
        self.told, self.gaps, self.prepared, self.decodes = None, [], [], []
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
            self.decodes.append((self.told, len(tokens)))
        return tokens

    def run_model(self, input_ids, positions, is_prefill):
        if not is_prefill and self.told is not None:
            self.gaps.append(time.perf_counter() - self.told)
            self.prepared.append(self.spent)
        return self.inner_model(input_ids, positions, is_prefill)


def gpu_row(nano, llm, size, way, args):
    """A size of requests to their end, on the engine that is there; its methods are as before afterwards."""
    runner, manager, config = llm.model_runner, llm.scheduler.block_manager, llm.scheduler
    ours = None
    if way == "attncore":
        choice = attncore.select(
            num_heads=16, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=SIZE, backend=args.backend
        )
        ours = Metadata(
            nano, choice.create("cuda"), max_num_seqs=config.max_num_seqs, max_model_len=LONGEST,
            max_num_batched_tokens=config.max_num_batched_tokens, num_blocks=len(manager.blocks),
        )  # fmt: skip
        ours.follow(manager)
    torch.manual_seed(0)
    timed = Timed(runner, ours)
    params = nano.sampling_params(temperature=0.6, ignore_eos=True, max_tokens=args.new)
    prompts = drawn_prompts(size, args.prompt, seed=size)
    for prompt in prompts:
        llm.add_request(prompt, params)
    outputs = {}
    while not llm.is_finished():
        for name, tokens in llm.step()[0]:
            outputs[name] = tokens
    for name in ("run", "run_model", "prepare_decode", "prepare_prefill", "prepare_sample"):
        delattr(runner, name)
    if ours is not None:
        del manager.deallocate
        ours.builder.close()
    manager.hash_to_block_id.clear()  # the next run finds no prefix of this one's
    whole = [(at, count) for at, count in timed.decodes if count == size] or timed.decodes
    seconds = whole[-1][0] - whole[0][0]
    row = {
        "size": size, "way": way, "decode_steps": len(timed.decodes),
        "tokens_per_s": sum(count for _, count in whole[1:]) / seconds,
        "step_ms": 1e3 * seconds / max(len(whole) - 1, 1),
        "gap_us": 1e6 * statistics.median(timed.gaps), "prepare_us": 1e6 * statistics.median(timed.prepared),
    }  # fmt: skip
    return row, [outputs[name] for name in sorted(outputs)]


def gpu_rows(nano, sizes, args):
    """Rows of every size, each way twice in turn; the better of two."""
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
            for way in ("warm-up", "nano-vllm", "attncore", "nano-vllm", "attncore"):
                row, outputs = gpu_row(nano, llm, size, way, args)
                if way != "warm-up" and (way not in best or row["tokens_per_s"] > best[way]["tokens_per_s"]):
                    best[way] = row
                said.setdefault(way, outputs)
            for way, row in best.items():
                yield row | {"agrees": said[way] == said["nano-vllm"]}


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
    return int(any(row.get("differs") or row.get("agrees") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
