"""Replay a request trace: requests in, attention out.

Reads a trace (Azure LLM inference CSV or Mooncake JSON Lines, recognised by content, also gzipped), or draws a
synthetic workload where none is given. Serves it with continuous batching over a paged KV cache (prefix reuse, chunked
prefill, preemption by recomputation), builds every step's metadata, runs the chosen backend's attention and checks a
sample against dense attention. Time is virtual: the same command takes the same steps on any machine. Exits with 1
where a check or the backend failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import math
import platform
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attncore.cli import replay_options
from attncore.cli.html_file import html_file
from attncore.cli.installed_backends import check_installed
from attncore.cli.persistent_builder_options import group_text
from attncore.cli.progress_bar import progress_bar, said_meanwhile
from attncore.cli.typed_input import say_that_it_reads
from attncore.command import UsageError, check_current_folder, fail, load_torch
from attncore.errors import NoBackendError
from attncore.how_to_install import install_extra
from attncore.json_output import print_json
from attncore.quoted import one_line
from attncore.registry.config_json import read_config
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.option_argument import options_of
from attncore.replay.backend_code import BackendError, named_errors
from attncore.replay.layers.attention_layers import torch_threads
from attncore.replay.results import report
from attncore.replay.results.save_steps import StepsFile, batch_line, persistent_line
from attncore.replay.results.terminal import print_report
from attncore.replay.runner import replay
from attncore.replay.scheduling.kv_cache_manager import check_pools
from attncore.replay.settings import Settings
from attncore.replay.traces import synthetic
from attncore.replay.traces.read_trace import read_trace
from attncore.replay.traces.trace import Trace, TraceError
from attncore.show import counted
from attncore.standard_output import kept_stream, stdout_to_stderr
from attncore.terminal import print_lines
from attncore.testing.bench.machine import machine
from attncore.versions import versions

if TYPE_CHECKING:
    from attncore.replay.layers.attention_layers import AttentionLayers
    from attncore.replay.layers.whole_model import ModelLayers

_WHY_NONE = "--metadata-only runs no attention"
_LONG = 10**12
"""Weights times tokens beyond which a run says what it does where no bar is drawn: a minute of a few cores."""


configure = replay_options.add_options


def run(args: argparse.Namespace) -> int:
    """Replay and report; 1 where a check or the backend failed."""
    try:
        with named_errors():
            return _run(args)
    except BackendError as error:
        return fail(error, 1)
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        raise UsageError(
            f"memory: not enough for this run{why}; lower --requests, --max-num-seqs, --num-heads or --head-size"
        ) from error


def _run(args: argparse.Namespace) -> int:
    check_current_folder()
    settings = replay_options.settings(args)
    if not args.json:
        importlib.import_module("rich")  # prints the report: that it is missing is said before the run
    trace = _trace(args)
    # before caches of so many blocks are allocated
    check_pools(trace.requests, settings.num_blocks, settings.groups_of_batch)
    line = batch_line
    if args.groups or args.speculative or args.context_parallel:
        line = functools.partial(persistent_line, groups=args.groups)
    with contextlib.ExitStack() as stack:
        record = StepsFile(args.save_steps, settings.block_size, line) if args.save_steps else None
        if record is not None:
            stack.push(record)  # first, so that an interrupt while it opens leaves nothing behind
            record.open()
        page = stack.enter_context(html_file(args.html))
        layers, why = _layers(args, settings, trace)  # behind the files: torch takes seconds, a mistyped name none
        _say_what_runs(layers, trace)
        for note in (trace.doubt, getattr(layers, "note", "")):
            if note:
                _say(f"note: {note}")
        progress = stack.enter_context(progress_bar(len(trace.requests)))
        if layers:
            stack.enter_context(torch_threads(args.threads))
        outcome = replay(trace.requests, settings, layers, record=record, progress=progress)
        written = report.as_json(
            outcome,
            trace={"source": trace.source, "format": trace.format},
            options=replay_options.options_in_report(args),
            layers=getattr(layers, "described", None),
            backend=layers.name if layers else None,
            why=why,
            environment=_environment(layers),
        )
        if page is not None:
            from attncore.replay.results.html_page import as_html

            page.write(as_html(written))
    if args.json:
        print_json(written)
    else:
        print_report(written)
        if args.save_steps:
            reader = " ".join(("attncore build", *_options_of_build(args)))
            print_lines(f"steps written to {one_line(args.save_steps)}, for `{reader}`", kept_stream("stdout"))
        if args.html:
            print_lines(f"page written to {one_line(args.html)}", kept_stream("stdout"))
    return 1 if outcome.verification.failed else 0


def _options_of_build(args: argparse.Namespace) -> Iterator[str]:
    """The options with which ``attncore build`` reads the steps that were saved; of ranks, those of the first."""
    if args.groups:
        yield f"--groups {shlex.quote(','.join(map(group_text, args.groups)))}"
    if args.speculative:
        yield f"--speculative {args.speculative.num_drafts}"
    if args.context_parallel:
        yield f"--context-parallel {args.context_parallel.world_size}:0:{args.context_parallel.interleave}"


def _environment(layers: AttentionLayers | ModelLayers | None) -> dict[str, Any]:
    """Versions, host and device of a run, for its report."""
    found, host = versions(), Host.probe()
    device = layers.device if layers else "cpu"
    for record in registry().records if layers else ():
        if layers is not None and record.name == layers.name:
            found[record.distribution] = record.version
    facts = machine()
    return {
        "versions": found,
        "host": {"cpu": facts["cpu"], "cores": int(facts["cores"]), "platform": platform.platform()},
        "device": device if device.startswith("cpu") else f"{device} ({host.device_name})",
    }


def _trace(args: argparse.Namespace) -> Trace:
    path = args.trace if args.trace is not None else args.trace_option
    seconds = math.inf if args.minutes is None else args.minutes * 60
    if path is not None:
        if path == "-":
            say_that_it_reads("replay", "a trace of requests")
        try:
            return read_trace(path, args.requests, seconds)
        except TraceError as error:  # begins with the file's name, which may be that of an option
            raise UsageError(str(error)) from error
    trace = synthetic.synthetic_trace(args.requests or synthetic.NUM_REQUESTS, args.seed)
    kept = tuple(request for request in trace.requests if request.arrival < seconds)
    return Trace(trace.source, trace.format, kept)


def _say(text: str) -> None:
    """A line on standard error."""
    print_lines(f"attncore replay: {text}", kept_stream("stderr"))


def _say_what_runs(layers: Any, trace: Trace) -> None:
    """A line that says how much a model is to run, where that may take long or somebody waits at a terminal."""
    if (model := getattr(layers, "model", None)) is None:
        return
    tokens = sum(request.prompt_tokens + request.output_tokens for request in trace.requests)
    weights = sum(one.numel() for one in model.parameters())
    if kept_stream("stderr").isatty() or (layers.device == "cpu" and weights * tokens > _LONG):
        amount = f"{counted(len(trace.requests), 'request', spec=',')} of {counted(tokens, 'token', spec=',')} in all"
        _say(
            f"runs {amount} through a model of {weights:,} weights on {layers.device}: {layers.described}; --requests "
            "N runs fewer"
        )


def _layers(
    args: argparse.Namespace, settings: Settings, trace: Trace
) -> tuple[AttentionLayers | ModelLayers | None, str]:
    """The attention layers or the model of this run (None: metadata only), and why their backend was chosen."""
    if args.metadata_only:
        return None, _WHY_NONE
    if args.model:
        _check_model_libraries()
    if importlib.util.find_spec("torch") is None:
        raise NoBackendError(f"torch is not installed: {install_extra('torch')}, or pass --metadata-only")
    if args.backend:
        with stdout_to_stderr():
            check_installed("--backend", args.backend)
    with stdout_to_stderr():
        options = options_of(args.backend, args.option, "--backend")
    if args.model:
        return _model(args.model, args.backend, options, settings, trace)
    load_torch()
    from attncore.replay.layers.make_layers import fitting_a_gpu, head_size_of, make_layers
    from attncore.replay.token_content import Content

    with stdout_to_stderr():  # plugins load
        fitting = None if args.backend else fitting_a_gpu(settings, args.num_heads, args.num_kv_heads, args.head_size)
        try:
            args.head_size = fitting[0] if fitting else head_size_of(args.backend, args.head_size)
        except ValueError as error:
            raise UsageError(str(error).replace("head_size", "--head-size", 1)) from None
    content = Content(args.num_heads, args.num_kv_heads, args.head_size, args.seed)
    with stdout_to_stderr():
        dtype = fitting[1] if fitting else None
        layers, why = make_layers(settings, content, args.layers, args.backend, dtype, options)
    if fitting:
        why += f"; with heads of {args.head_size} and {layers.dtype}, which it has"
    return layers, why


def _check_model_libraries() -> None:
    """UsageError that names all of what --model needs and is not installed."""
    if missing := [name for name in ("transformers", "torch") if importlib.util.find_spec(name) is None]:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UsageError(f"--model: {what}: {install_extra('transformers')}")


def _model(
    path: str, backend: str | None, options: Mapping[str, Any], settings: Settings, trace: Trace
) -> tuple[ModelLayers, str]:
    try:
        read_config(path)  # a mistyped name is said before torch and transformers are imported, which takes seconds
    except ValueError as error:
        raise UsageError(f"--model: {error}") from None
    load_torch()
    from attncore.replay.layers.whole_model import ModelLayers
    from attncore.replay.model_error import ModelError

    with stdout_to_stderr(), said_meanwhile("making the model"):
        try:
            lengths = [request.prompt_tokens + request.output_tokens for request in trace.requests]  # one at least
            layers = ModelLayers(path, settings, backend, max(lengths), sum(lengths), options=options)
            layers.check_lengths(trace.requests)
        except ModelError as error:
            raise UsageError(f"--model: {error}") from error
    return layers, layers.why
