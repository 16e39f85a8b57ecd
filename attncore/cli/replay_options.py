"""The options of ``replay``: how they are added and parsed, and the Settings that they state together."""

from __future__ import annotations

import argparse
import os
from typing import Any

from attncore.cli.argument_types import add_integer, backend_name, integer, number, parse_integer
from attncore.cli.persistent_builder_options import (
    GROUPS_METAVAR,
    MAX_BLOCK_SIZE,
    MAX_RANKS,
    Ranks,
    check_ranks,
    group_text,
    parse_drafts,
    parse_groups,
)
from attncore.command import UsageError, name_in_place_of
from attncore.quoted import quoted
from attncore.registry.plugins.option_argument import add_option_argument
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.scheduling.draft_model import DEFAULT_ACCEPTANCE, Speculation
from attncore.replay.settings import Settings
from attncore.replay.traces import synthetic
from attncore.show import counted
from attncore.written_file import check_written_file

_DEFAULTS = Settings()
NUM_KV_HEADS = 2
"""Key/value heads unless they are given."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of the command."""
    name_in_place_of(parser, config="--model DIR")
    _add_trace_options(parser)
    _add_engine_options(parser)
    _add_attention_options(parser)
    _add_result_options(parser)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        metavar="TRACE",
        help=f"trace file, - for standard input; absent: a synthetic workload ({synthetic.DESCRIPTION})",
    )
    add("--trace", dest="trace_option", metavar="TRACE", help="the same, as an option")
    add(
        "--requests",
        type=integer(1, 10**7),
        metavar="N",
        help=f"only the first N requests (default: all of a trace, {synthetic.NUM_REQUESTS} synthetic ones)",
    )
    add("--minutes", type=number(1e-6, 1e9), metavar="M", help="only what arrives in the first M minutes of the trace")
    add(
        "--rate",
        type=number(1e-6, 1e6),
        default=1.0,
        metavar="X",
        help="time scale: X times as many requests a second (default 1)",
    )
    add(
        "--clock",
        type=_parse_clock,
        default=_DEFAULTS.clock,
        metavar="COSTS",
        help=f"virtual microseconds a step, prompt token, decode and token of context (default {_DEFAULTS.clock})",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_integer(parser, "--num-blocks", 2, 2**31 - 1, _DEFAULTS.num_blocks, "blocks of the cache, block 0 not used")
    add(
        "--block-size",
        type=integer(1, MAX_BLOCK_SIZE),
        metavar="N",
        help=f"tokens a block holds (default {_DEFAULTS.block_size}, or what --groups states)",
    )
    add(
        "--groups",
        type=parse_groups,
        metavar=GROUPS_METAVAR,
        help="KV-cache groups, each with --num-blocks blocks of its own; layers are dealt among them in turn, blocks "
        "that a window has passed are given up (example: full:16,window:16:1024)",
    )
    add(
        "--speculative",
        type=_parse_speculation,
        metavar="K[:ACCEPT]",
        help="decodes run up to K drafts beside their token, each accepted, where all before it were, with probability "
        f"ACCEPT (default {DEFAULT_ACCEPTANCE}); the others are rolled back",
    )
    add(
        "--context-parallel",
        type=_parse_ranks,
        metavar="WORLD[:INTERLEAVE]",
        help="WORLD ranks share out the tokens of every request, INTERLEAVE (default 1) in turn; blocks hold "
        "--block-size tokens on each",
    )
    add(
        "--max-num-seqs",
        type=integer(1, 2**20),
        metavar="N",
        help=f"requests running at a time (default {_DEFAULTS.max_num_seqs}, or --max-num-batched-tokens where less)",
    )
    add_integer(parser, "--max-num-batched-tokens", 1, 2**24, _DEFAULTS.max_num_batched_tokens, "tokens of a step")


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_integer(parser, "--num-heads", 1, 1024, 4, "query heads")
    add_integer(parser, "--num-kv-heads", 1, 1024, NUM_KV_HEADS, "key-value heads, a divisor of --num-heads")
    add(
        "--head-size",
        type=integer(1, 1024),
        metavar="N",
        help="numbers a head has; scores are divided by its square root (default 32; of --backend, or on a GPU, "
        "what the backend has)",
    )
    add(
        "--layers",
        type=integer(1, 1024),
        metavar="N",
        help="attention layers, each with its own cache (default 2, or as many as --groups has groups where more)",
    )
    add_integer(parser, "--threads", 1, 1024, 1, "of torch on a CPU; more help with long prompts only")
    add(
        "--model",
        metavar="CONFIG.json",
        help="a whole model of transformers with random weights, by its configuration, in place of attention alone",
    )
    add(
        "--backend", type=backend_name, metavar="NAME", help="attention backend (default: what attncore.select chooses)"
    )
    add_option_argument(parser, "--backend")


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_integer(parser, "--seed", 0, 2**63 - 1, _DEFAULTS.seed, "of workload, keys and values, and sample")
    add_integer(
        parser,
        "--verify-every",
        1,
        10**9,
        _DEFAULTS.verify_every,
        "checks one request in K against dense attention; with --metadata-only, every K-th step",
        "K",
    )
    add(
        "--metadata-only",
        action="store_true",
        help="no attention (torch is not needed); every K-th step's metadata is compared with a plain recount",
    )
    add("--save-steps", metavar="FILE", help="write every step's batch to FILE, for `attncore build`")
    add("--html", metavar="FILE", help="write the report to FILE too, as one page with plots (attncore[html])")
    add("--json", action="store_true", help="print the report as JSON")


def settings(args: argparse.Namespace) -> Settings:
    """What the options state together; those left open are filled in. UsageError where they contradict each other."""
    _check_contradictions(args)
    each = 1 + (args.speculative.num_drafts if args.speculative else 0)
    if args.max_num_seqs is None:
        args.max_num_seqs = max(1, min(_DEFAULTS.max_num_seqs, args.max_num_batched_tokens // each))
    if args.max_num_batched_tokens < args.max_num_seqs * each:
        each_needs = f" times {each} (--speculative)" if each > 1 else ""
        tokens = f"{each} tokens" if each > 1 else "a token"
        raise UsageError(
            f"--max-num-batched-tokens: {args.max_num_batched_tokens} is less than --max-num-seqs "
            f"{args.max_num_seqs}{each_needs}; each running request may need {tokens} in the same step"
        )
    if args.layers is None and not args.model:
        args.layers = max(2, len(args.groups or ()))
    if args.block_size is None and not args.groups:
        args.block_size = _DEFAULTS.block_size
    ranks = args.context_parallel or Ranks()
    stated = Settings(
        num_blocks=args.num_blocks, block_size=args.block_size or args.groups[0].block_size,
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens, rate=args.rate,
        clock=args.clock, verify_every=args.verify_every, seed=args.seed, groups=args.groups,
        speculation=args.speculative, world_size=ranks.world_size, interleave=ranks.interleave,
    )  # fmt: skip
    if args.context_parallel:
        check_ranks(ranks, stated.groups_of_rank)
    return stated


def options_in_report(args: argparse.Namespace) -> dict[str, Any]:
    """The options that determine the steps, by name; those of a model, groups, drafts and ranks only where given."""
    names = (
        "requests", "minutes", "rate", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "num_heads", "num_kv_heads", "head_size", "layers", "threads", "seed", "verify_every", "metadata_only",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names} | {"clock": str(args.clock)}
    if args.model:
        options["model"] = args.model
    if args.groups:
        options["groups"] = ",".join(map(group_text, args.groups))
    if args.speculative:
        options["speculative"] = str(args.speculative)
    if args.context_parallel:
        options["context_parallel"] = f"{args.context_parallel.world_size}:{args.context_parallel.interleave}"
    if args.option:
        options["option"] = " ".join(args.option)
    return options


def _check_contradictions(args: argparse.Namespace) -> None:
    if args.trace is not None and args.trace_option is not None:
        raise UsageError(f"--trace: {args.trace_option} and {args.trace} are both given; one trace is replayed")
    if args.num_heads % args.num_kv_heads:
        heads = args.num_kv_heads
        if heads == NUM_KV_HEADS:  # which was hardly given
            raise UsageError(
                f"--num-heads: {args.num_heads} is no multiple of --num-kv-heads, by default {heads}; give both"
            )
        raise UsageError(f"--num-kv-heads: {heads} does not divide --num-heads {args.num_heads}")
    if args.groups and args.block_size is not None:
        raise UsageError(f"--block-size: {args.block_size} given beside --groups, which states block sizes")
    if args.groups and args.layers is not None and args.layers < len(args.groups) and not args.metadata_only:
        raise UsageError(
            f"--layers: {args.layers} given for {counted(len(args.groups), 'group')}; each needs a layer at least"
        )
    if args.backend and args.metadata_only:
        raise UsageError(f"--backend: {quoted(args.backend)} given beside --metadata-only, which runs none")
    if args.option and args.metadata_only:
        raise UsageError(f"--option: {quoted(args.option[0])} given beside --metadata-only, which runs no backend")
    if args.model:
        for name in ("metadata_only", "groups", "speculative", "context_parallel", "layers"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')}: given beside --model, which runs a model as it is")
    _check_files(args)


def _check_files(args: argparse.Namespace) -> None:
    """UsageError where a file that is written is one that is read, the other one, or where the report goes."""
    model = args.model and (os.path.join(args.model, "config.json") if os.path.isdir(args.model) else args.model)
    others = {"the trace itself": args.trace or args.trace_option, "the model's own": model}
    for option, file in {"--save-steps": args.save_steps, "--html": args.html}.items():
        if file:
            check_written_file(option, file, others)
            others[f"the file of {option}"] = file


def _parse_speculation(text: str) -> Speculation:
    """``3`` or ``3:0.8``: the most drafts of a decode, and the probability that each is accepted."""
    count, colon, acceptance = text.partition(":")
    num_drafts = parse_drafts(count)
    return Speculation(num_drafts, number(0, 1, "ACCEPT")(acceptance)) if colon else Speculation(num_drafts)


def _parse_ranks(text: str) -> Ranks:
    """``2`` or ``2:4``: number of ranks, and tokens that each takes in turn."""
    world, *rest = text.split(":")
    if len(rest) > 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not WORLD or WORLD:INTERLEAVE")
    world_size = parse_integer(world, 2, MAX_RANKS, "WORLD")
    return Ranks(world_size, parse_integer(rest[0], 1, MAX_BLOCK_SIZE, "INTERLEAVE") if rest else 1)


def _parse_clock(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("clock: ")) from None
