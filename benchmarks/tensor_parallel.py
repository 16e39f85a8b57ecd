"""A decode step of examples/ranks.py beside the same on one GPU: tensor parallelism by transformers' ``tp_plan``.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--shapes 1b,8b] [--backends flash] [--save FILE]

Llamas with random weights in bfloat16, shaped as ``--shapes`` says, and 64 requests that arrive at once. A row for each
shape and backend, and each of: ``one``, rank 0 alone with the whole model while the others wait; ``ranks``, each with
its part of every layer, over NCCL; with ``--compile``, both again with compiled layers. ``decode_us`` is the median
device time of the graph of 64 decodes on rank 0, by CUDA events; without graphs the time of the forward pass of as many
decodes on the host's clock. ``tokens_per_s`` counts from the first step to the last. ``part`` is ranks' ``decode_us``
by one's. ``agrees`` is the part of all tokens before the first that differs from one's: in bfloat16, sums of parts
round otherwise.

The floor of ranks is ``floor_us``: ``part_us``, the same graph of a model that is one rank's part, without collectives,
and ``collectives_us``, a graph of the bare all-reduces of a step, two a layer, and the gathering of the logits.

``--device cpu --shapes tiny`` tries the code by gloo, without a GPU; its times mean nothing. Exit code 1 where tokens
differ in float32.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent.parent / "examples"), str(Path(__file__).parent)]
import ranks as example  # noqa: E402
from collective_floor import all_gather, collectives_us  # noqa: E402
from compiled_engine import SIZE, Timed  # noqa: E402
from gpu import machine  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers_gpu import agreement, drawn  # noqa: E402

HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 16384}
SHAPES = {
    "8b": HEADS | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": HEADS | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16},
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 16384,
    },
}  # fmt: skip


class TimedRank(Timed, example.FirstRank):
    """Rank 0, which keeps the time of each step of ``SIZE`` decodes."""


def model_of(shape, device, ranks=1):
    """The whole model, the same on every rank; of several ``ranks``, one that is as large as a part of it."""
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    shape = {name: value // ranks if name in shared else value for name, value in SHAPES[shape].items()}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    torch.set_default_dtype(before)
    return model


def shared_out(model, device):
    """This rank's part of it."""
    count = dist.get_world_size()
    parts = DistributedConfig(tp_size=count, tp_plan="auto")
    return type(model).maybe_distribute_model(model, parts, dist.init_device_mesh(device, (count,))).to(device)


def options_of(args, backend, compiled):
    size, longest = 256 if backend == "flash" else 16, args.prompt + args.new + 1
    return {
        "num_blocks": (SIZE + 2) * -(-longest // size) + 1, "max_num_reqs": SIZE, "max_model_len": longest,
        "max_num_batched_tokens": args.budget, "block_size": size, "backend": backend, "compile": compiled,
        "graph_sizes": (1, SIZE) if args.device == "cuda" else (),
    }  # fmt: skip


def bare_collectives_us(args, shape):
    """Of one step of ``SIZE`` decodes, on this rank."""
    sizes, world = SHAPES[shape], dist.get_world_size()
    device = f"cuda:{torch.cuda.current_device()}" if args.device == "cuda" else "cpu"
    kind = {"dtype": torch.bfloat16 if args.device == "cuda" else torch.float32, "device": device}
    hidden = torch.zeros(SIZE, sizes["hidden_size"], **kind)
    logits = torch.zeros(SIZE, sizes["vocab_size"] // world, **kind)
    gathered = torch.empty(world * SIZE, *logits.shape[1:], **kind)

    def call():
        for _ in range(2 * sizes["num_hidden_layers"]):
            dist.all_reduce(hidden)
        all_gather(gathered, logits)

    return collectives_us(call, device)


def row_of(args, shape, backend, way, compiled):
    """One engine's figures, and what it said; None on other ranks than the first, which do what it says."""
    alone, first = way != "ranks", not dist.get_rank()
    if alone and not first:
        return None
    model = model_of(shape, args.device, dist.get_world_size() if way == "part" else 1)
    if not alone:
        model = shared_out(model, args.device)
    options, start = options_of(args, backend, compiled), time.perf_counter()
    if not first:
        return example.OtherRank(model, **options).serve()
    engine = (Timed if alone else TimedRank)(model, **options)
    set_up = time.perf_counter() - start
    engine.complete(drawn([args.prompt] * 2, engine.vocab_size, seed=1), 4)  # libraries make their workspaces
    engine.spans.clear()
    prompts, start = drawn([args.prompt] * SIZE, engine.vocab_size, seed=0), time.perf_counter()
    outputs = engine.complete(prompts, args.new)
    wall = time.perf_counter() - start
    row = {
        "shape": shape, "backend": f"{engine.choice.name} {engine.choice.variant}".strip(), "way": way,
        "compiled": compiled, "set_up_s": round(set_up, 2), "decode_us": engine.decode_us(),
        "decode_steps": len(engine.spans), "tokens_per_s": sum(map(len, outputs)) / wall,
        "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip
    engine.close()
    return row, outputs


def rows_of(args, shape, backend, compiled):
    """The rows of both ways, printed; on other ranks than the first, none."""
    rows, said, part_us = [], None, None
    bare_us = bare_collectives_us(args, shape)
    for way in ("part", "one", "ranks"):
        found = row_of(args, shape, backend, way, compiled)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        dist.barrier()
        if found is None:
            continue
        row, outputs = found
        if way == "part":
            part_us = row["decode_us"]
            continue
        said = said or outputs
        row["agrees"] = agreement(said, outputs)
        if rows and row["decode_us"]:
            floor_us = part_us + bare_us
            row |= {"part_us": part_us, "collectives_us": bare_us, "floor_us": floor_us}
            row |= {"part": row["decode_us"] / rows[0]["decode_us"], "floor_part": floor_us / rows[0]["decode_us"]}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def arguments(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shapes", default="1b,8b", help="of 1b, 8b, tiny")
    add("--backends", default="flash,flashinfer", help="of flash, flashinfer, rocm, reference")
    add("--compile", action="store_true", help="both ways with compiled layers, too")
    add("--prompt", type=int, default=600, help="tokens of each prompt")
    add("--new", type=int, default=64, help="new tokens of each request")
    add("--budget", type=int, default=4096, help="tokens of a step at most")
    add("--save", metavar="FILE")
    return parser.parse_args(words)


def main(words=None):
    args = arguments(words)
    if "RANK" not in os.environ:
        print("tensor_parallel.py: no RANK in the environment; start it by torchrun", file=sys.stderr)
        return 2
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rows = []
    for shape in args.shapes.split(","):
        for backend in args.backends.split(","):
            for compiled in (False, True) if args.compile else (False,):
                rows += rows_of(args, shape, backend, compiled)
    if not dist.get_rank() and args.save:
        found = {"machine": machine(), "ranks": dist.get_world_size(), "requests": SIZE, "prompt": args.prompt}
        Path(args.save).write_text(json.dumps({**found, "new": args.new, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return int(any(row["dtype"] == "float32" and row["agrees"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
