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
import importlib.util
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncore.cli import UsageError
from attncore.cli.output import print_json, stdout_to_stderr
from attncore.errors import NoBackendError
from attncore.replay import report, synthetic
from attncore.replay.attention import AttentionLayers, torch_threads
from attncore.replay.cache_blocks import check_pools
from attncore.replay.clock import CostModel
from attncore.replay.runner import Settings, replay
from attncore.replay.steps_file import StepsFile
from attncore.replay.traces import Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
        type=_integer(1, 10**7),
        metavar="N",
        help=f"only the first N requests (default: all of a trace, {synthetic.NUM_REQUESTS} synthetic ones)",
    )
    add("--minutes", type=_number(1e-6, 1e9), metavar="M", help="only what arrives in the first M minutes of the trace")
    add(
        "--rate",
        type=_number(1e-6, 1e6),
        default=1.0,
        metavar="X",
        help="time scale: X times as many requests a second (default 1)",
    )
    add(
        "--clock",
        type=_clock,
        default=_DEFAULTS.clock,
        metavar="COSTS",
        help=f"virtual microseconds a step, prompt token, decode and token of context (default {_DEFAULTS.clock})",
    )
    _integer_option(parser, "--num-blocks", 2, 2**31 - 1, _DEFAULTS.num_blocks, "blocks of the cache, block 0 not used")
    _integer_option(parser, "--block-size", 1, 2**20, _DEFAULTS.block_size, "tokens a block holds")
    add(
        "--max-num-seqs",
        type=_integer(1, 2**20),
        metavar="N",
        help=f"requests running at a time (default {_DEFAULTS.max_num_seqs}, or --max-num-batched-tokens where less)",
    )
    _integer_option(parser, "--max-num-batched-tokens", 1, 2**24, _DEFAULTS.max_num_batched_tokens, "tokens of a step")
    _integer_option(parser, "--num-heads", 1, 1024, 4, "query heads")
    _integer_option(parser, "--num-kv-heads", 1, 1024, 2, "key-value heads, a divisor of --num-heads")
    _integer_option(parser, "--head-size", 1, 1024, 32, "numbers a head has; scores are scaled by its square root")
    _integer_option(parser, "--layers", 1, 1024, 2, "attention layers, each with its own cache")
    _integer_option(parser, "--threads", 1, 1024, 1, "of torch on a CPU; more help with long prompts only")
    add("--backend", metavar="NAME", help="attention backend (default: what attncore.select chooses)")
    _integer_option(parser, "--seed", 0, 2**63 - 1, _DEFAULTS.seed, "of workload, keys and values, and sample")
    _integer_option(
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
    if args.max_num_seqs is None:
        args.max_num_seqs = min(_DEFAULTS.max_num_seqs, args.max_num_batched_tokens)
    settings = Settings(
        num_blocks=args.num_blocks, block_size=args.block_size, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, rate=args.rate, clock=args.clock,
        verify_every=args.verify_every, seed=args.seed,
    )  # fmt: skip
    _check_together(args)
    trace = _trace(args)
    # Before caches of that many blocks are made.
    check_pools(trace.requests, settings.num_blocks, settings.groups_of_batch)
    layers, why = _layers(args)
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(StepsFile(args.save_steps, args.block_size)) if args.save_steps else None
        progress = stack.enter_context(_progress(len(trace.requests)))
        if layers:
            stack.enter_context(torch_threads(args.threads))
        outcome = replay(trace.requests, settings, layers, record=record, progress=progress)
    found = report.as_json(
        outcome,
        trace={"source": trace.source, "format": trace.format},
        options=_options(args),
        backend=layers.backend.name if layers else None,
        why=why,
    )
    if args.json:
        print_json(found)
    else:
        report.print_table(found)
    return 1 if outcome.verification.failed else 0


def _check_together(args: argparse.Namespace) -> None:
    if args.trace is not None and args.trace_option is not None:
        raise UsageError(f"--trace: {args.trace_option} and {args.trace} are both given; one trace is replayed")
    if args.num_heads % args.num_kv_heads:
        raise UsageError(f"--num-kv-heads: {args.num_kv_heads} does not divide --num-heads {args.num_heads}")
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens: {args.max_num_batched_tokens} is less than --max-num-seqs {args.max_num_seqs}; "
            "each running request may need a token in the same step"
        )
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


def _layers(args: argparse.Namespace) -> tuple[AttentionLayers | None, str]:
    """The attention of this run (None: metadata only), and why this backend runs it."""
    if args.metadata_only:
        return None, _WHY_NONE
    if importlib.util.find_spec("torch") is None:
        raise NoBackendError(
            "torch is not installed and attention needs it: pip install attncore[torch], or pass --metadata-only"
        )
    from attncore.registry.select import select
    from attncore.replay.content import Content

    with stdout_to_stderr():
        choice = select(
            num_heads=args.num_heads, num_kv_heads=args.num_kv_heads, head_size=args.head_size, dtype="float32",
            block_size=args.block_size, num_blocks=args.num_blocks, backend=args.backend,
        )  # fmt: skip
        backend = choice.create()
    content = Content(args.num_heads, args.num_kv_heads, args.head_size, args.seed)
    layers = AttentionLayers(backend, content, args.layers, args.num_blocks)
    return layers, choice.explain().splitlines()[0].partition(": ")[2]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What settles the steps, for the report."""
    names = (
        "requests", "minutes", "rate", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "num_heads", "num_kv_heads", "head_size", "layers", "threads", "seed", "verify_every", "metadata_only",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names} | {"clock": str(args.clock)}


@contextlib.contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=num_requests)
        yield lambda finished: bar.update(task, completed=finished)


def _integer_option(
    parser: argparse.ArgumentParser, name: str, low: int, high: int, default: int, text: str, metavar: str = "N"
) -> None:
    parser.add_argument(
        name, type=_integer(low, high), default=default, metavar=metavar, help=f"{text} (default {default})"
    )


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
        if not low <= value <= high:  # NaN neither
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    return parse


def _clock(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("clock: ")) from None
