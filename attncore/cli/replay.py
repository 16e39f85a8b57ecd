"""Replay a request trace: requests in, attention out.

Reads a trace (Azure LLM inference CSV or Mooncake JSON Lines, told by content, also gzipped), or draws a synthetic
workload where none is given. Serves it with continuous batching over a paged KV cache (prefix reuse, chunked prefill,
preemption by recomputation), builds every step's metadata, runs the chosen backend's attention and checks a sample
against dense attention. Time is virtual: the same command takes the same steps on any machine. Ends with exit code 1
where a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncore.cli import UsageError, persistent_options
from attncore.cli.argument_types import clock, integer, integer_option, number
from attncore.cli.output import print_json, stdout_to_stderr
from attncore.cli.progress import progress_bar
from attncore.errors import NoBackendError
from attncore.replay.layers.attention_layers import torch_threads
from attncore.replay.results import report
from attncore.replay.results.save_steps import StepsFile, batch_line, persistent_line
from attncore.replay.runner import replay
from attncore.replay.scheduling.cache_blocks import check_pools
from attncore.replay.settings import Settings
from attncore.replay.traces import synthetic
from attncore.replay.traces.read_trace import read_trace
from attncore.replay.traces.trace import Trace

if TYPE_CHECKING:
    from attncore.replay.layers.attention_layers import AttentionLayers
    from attncore.replay.layers.whole_model import ModelLayers

HELP = "replay a request trace: scheduler, paged cache, metadata and attention, verified"

_DEFAULTS = Settings()
_WHY_NONE = "--metadata-only runs no attention"


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help=f"trace file; absent: a synthetic workload ({synthetic.DESCRIPTION})")
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
        type=clock,
        default=_DEFAULTS.clock,
        metavar="COSTS",
        help=f"virtual microseconds a step, prompt token, decode and token of context (default {_DEFAULTS.clock})",
    )
    integer_option(parser, "--num-blocks", 2, 2**31 - 1, _DEFAULTS.num_blocks, "blocks of the cache, block 0 not used")
    add(
        "--block-size",
        type=integer(1, persistent_options.MAX_BLOCK_SIZE),
        metavar="N",
        help=f"tokens a block holds (default {_DEFAULTS.block_size}, or what --groups states)",
    )
    persistent_options.add_to_replay(parser)
    add(
        "--max-num-seqs",
        type=integer(1, 2**20),
        metavar="N",
        help=f"requests running at a time (default {_DEFAULTS.max_num_seqs}, or --max-num-batched-tokens where less)",
    )
    integer_option(parser, "--max-num-batched-tokens", 1, 2**24, _DEFAULTS.max_num_batched_tokens, "tokens of a step")
    integer_option(parser, "--num-heads", 1, 1024, 4, "query heads")
    integer_option(parser, "--num-kv-heads", 1, 1024, 2, "key-value heads, a divisor of --num-heads")
    integer_option(parser, "--head-size", 1, 1024, 32, "numbers a head has; scores are scaled by its square root")
    add(
        "--layers",
        type=integer(1, 1024),
        metavar="N",
        help="attention layers, each with its own cache (default 2, or as many as --groups has groups where more)",
    )
    integer_option(parser, "--threads", 1, 1024, 1, "of torch on a CPU; more help with long prompts only")
    add(
        "--model",
        metavar="CONFIG.json",
        help="a whole model of transformers with random weights, by its configuration, in place of attention alone",
    )
    add("--backend", metavar="NAME", help="attention backend (default: what attncore.select chooses)")
    integer_option(parser, "--seed", 0, 2**63 - 1, _DEFAULTS.seed, "of workload, keys and values, and sample")
    integer_option(
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
    add("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Replay and report; 1 where a check failed."""
    try:
        return _run(args)
    except MemoryError as error:
        raise UsageError(
            f"memory: not enough for this run ({error}); lower --requests, --max-num-seqs, --num-heads or --head-size"
        ) from error


def _run(args: argparse.Namespace) -> int:
    _check_together(args)
    settings = _settings(args)
    trace = _trace(args)
    # Before caches of that many blocks are made.
    check_pools(trace.requests, settings.num_blocks, settings.groups_of_batch)
    layers, why = _layers(args, settings, trace)
    line = batch_line
    if args.groups or args.speculative or args.context_parallel:
        line = functools.partial(persistent_line, groups=args.groups)
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(StepsFile(args.save_steps, settings.block_size, line)) if args.save_steps else None
        progress = stack.enter_context(progress_bar(len(trace.requests)))
        if layers:
            stack.enter_context(torch_threads(args.threads))
        outcome = replay(trace.requests, settings, layers, record=record, progress=progress)
    found = report.as_json(
        outcome,
        trace={"source": trace.source, "format": trace.format},
        options=_options(args),
        backend=layers.name if layers else None,
        why=why,
    )
    if args.json:
        print_json(found)
    else:
        report.print_table(found)
    return 1 if outcome.verification.failed else 0


def _settings(args: argparse.Namespace) -> Settings:
    """What the options say together; those left open are filled in."""
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
    ranks = args.context_parallel or persistent_options.Ranks()
    settings = Settings(
        num_blocks=args.num_blocks, block_size=args.block_size or args.groups[0].block_size,
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens, rate=args.rate,
        clock=args.clock, verify_every=args.verify_every, seed=args.seed, groups=args.groups,
        speculation=args.speculative, world_size=ranks.world_size, interleave=ranks.interleave,
    )  # fmt: skip
    if args.context_parallel:
        persistent_options.check_ranks(ranks, settings.groups_of_rank)
    return settings


def _check_together(args: argparse.Namespace) -> None:
    if args.trace is not None and args.trace_option is not None:
        raise UsageError(f"--trace: {args.trace_option} and {args.trace} are both given; one trace is replayed")
    if args.num_heads % args.num_kv_heads:
        raise UsageError(f"--num-kv-heads: {args.num_kv_heads} does not divide --num-heads {args.num_heads}")
    if args.groups and args.block_size is not None:
        raise UsageError(f"--block-size: {args.block_size} given beside --groups, which states block sizes")
    if args.groups and args.layers is not None and args.layers < len(args.groups) and not args.metadata_only:
        raise UsageError(f"--layers: {args.layers} given for {len(args.groups)} groups; each needs a layer at least")
    if args.context_parallel and args.backend not in (None, "reference") and not args.metadata_only:
        raise UsageError(
            f"--context-parallel: ranks attend by backend reference, and --backend is {args.backend}; leave it out, or "
            "pass --metadata-only"
        )
    if args.model:
        for name in ("metadata_only", "groups", "speculative", "context_parallel", "layers"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')}: given beside --model, which runs a model as it is")
    path = args.trace or args.trace_option
    if path and args.save_steps and Path(path).resolve() == Path(args.save_steps).resolve():
        raise UsageError(f"--save-steps: {args.save_steps} is the trace itself")


def _trace(args: argparse.Namespace) -> Trace:
    path = args.trace if args.trace is not None else args.trace_option
    seconds = math.inf if args.minutes is None else args.minutes * 60
    if path is not None:
        return read_trace(path, args.requests, seconds)
    trace = synthetic.synthetic_trace(args.requests or synthetic.NUM_REQUESTS, args.seed)
    kept = tuple(request for request in trace.requests if request.arrival < seconds)
    return Trace(trace.source, trace.format, kept)


def _layers(
    args: argparse.Namespace, settings: Settings, trace: Trace
) -> tuple[AttentionLayers | ModelLayers | None, str]:
    """The attention or the model of this run (None: metadata only), and why this backend runs it."""
    if args.metadata_only:
        return None, _WHY_NONE
    if importlib.util.find_spec("torch") is None:
        raise NoBackendError(
            "torch is not installed and attention needs it: pip install attncore[torch], or pass --metadata-only"
        )
    if args.model:
        return _model(args.model, args.backend, settings, trace)
    from attncore.replay.layers.make_layers import make_layers
    from attncore.replay.token_content import Content

    content = Content(args.num_heads, args.num_kv_heads, args.head_size, args.seed)
    with stdout_to_stderr():
        return make_layers(settings, content, args.layers, args.backend)


def _model(path: str, backend: str | None, settings: Settings, trace: Trace) -> tuple[ModelLayers, str]:
    if importlib.util.find_spec("transformers") is None:
        raise NoBackendError("transformers is not installed and --model needs it: pip install attncore[transformers]")
    from attncore.replay.errors import ModelError
    from attncore.replay.layers.whole_model import ModelLayers

    with stdout_to_stderr():
        try:
            layers = ModelLayers(path, settings, backend)
            layers.check_lengths(trace.requests)
        except ModelError as error:
            raise UsageError(f"--model: {error}") from error
    return layers, layers.why


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What settles the steps, for the report. The last three only where they were given."""
    names = (
        "requests", "minutes", "rate", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "num_heads", "num_kv_heads", "head_size", "layers", "threads", "seed", "verify_every", "metadata_only",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names} | {"clock": str(args.clock)}
    if args.model:
        options["model"] = args.model
    if args.groups:
        options["groups"] = ",".join(map(persistent_options.group_text, args.groups))
    if args.speculative:
        options["speculative"] = str(args.speculative)
    if args.context_parallel:
        options["context_parallel"] = f"{args.context_parallel.world_size}:{args.context_parallel.interleave}"
    return options
