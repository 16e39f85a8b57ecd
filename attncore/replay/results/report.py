"""The report of a replay: as JSON types, and as a table on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.quoted import one_line
from attncore.replay.results.measurements import microseconds, quantiles, total

if TYPE_CHECKING:
    from attncore.replay.results.measurements import Outcome


def as_json(outcome: Outcome, *, trace: dict[str, str], options: dict[str, Any], backend: str | None, why: str) -> Any:
    """The report as JSON types. ``build_us``, ``attention_us`` and ``wall_s`` are times; nothing else depends on the
    machine. ``attention_us`` and ``verification.max_abs_error`` are null where only metadata was built;
    a model's time is ``model_us``."""
    steps, verification = outcome.steps, outcome.verification
    prefill, decode = total(steps.prefill_tokens), total(steps.decode_tokens)
    # Only of a run that has it: reports of others stay as they were.
    added: dict[str, Any] = {}
    if "speculative" in options:
        added["speculative"] = {"drafted": steps.drafted, "accepted": steps.accepted}
    if "groups" in options:
        added["passed_blocks"] = steps.passed_blocks
    forward = microseconds(steps.attention_ns) if steps.attention_ns else None
    if "model" in options:
        added["model_us"], forward = forward, None
    return {
        "trace": trace,
        "options": options,
        "steps": len(steps.build_ns),
        "requests": outcome.requests,
        "tokens": prefill + decode,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "prefix_hit_tokens": outcome.prefix_hit_tokens,
        "preemptions": outcome.preemptions,
        **added,
        "virtual_s": outcome.virtual_seconds,
        "batch": {
            "requests": quantiles(steps.requests),
            "decodes": quantiles(steps.decodes),
            "prefill_tokens": quantiles(steps.prefill_tokens),
            "widest_row": outcome.widest_row,
        },
        "build_us": microseconds(steps.build_ns),
        "attention_us": forward,
        "verification": {
            "checked": verification.checked,
            "failed": verification.failed,
            "max_abs_error": verification.max_abs_error,
            "failures": verification.failures,
        },
        "kernels": outcome.kernels,
        "backend": backend,
        "why": why,
        "wall_s": outcome.wall_seconds,
    }


def print_table(report: dict[str, Any]) -> None:
    """The report on standard output, 80 columns wide at most; its last line says in one sentence how it went."""
    from rich.console import Console
    from rich.table import Table

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process

    console = Plain(markup=False, highlight=False, emoji=False)
    console.width = min(console.width, 80)
    trace = report["trace"]
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(report):
        facts.add_row(name, one_line(text))
    spread = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    spread.add_column("a step", no_wrap=True)
    for column in ("p50", "p90", "p99", "max"):
        spread.add_column(column, justify="right")
    for name, values in _spreads(report):
        spread.add_row(name, *map(_figure, values.values()))
    console.print(f"Replay of {one_line(trace['source'])} ({trace['format']})", soft_wrap=True)
    for part in ("", facts, "", spread, ""):
        console.print(part)
    for failure in report["verification"]["failures"]:
        console.print(f"failed: {one_line(failure)}", soft_wrap=True)
    console.print(verdict(report))


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    checked = report["verification"]
    parts = f"{report['prefill_tokens']:,} of prompts, {report['decode_tokens']:,} decoded"
    options = report["options"]
    size = f" of {options['block_size']} tokens" if options["block_size"] else ""
    added = []
    if "groups" in options:
        added.append(("groups", f"{options['groups']}; {report['passed_blocks']:,} blocks passed by windows"))
    if "speculative" in options:
        drafts = report["speculative"]
        added.append(("drafts", f"{drafts['drafted']:,} run, {drafts['accepted']:,} accepted"))
    if "context_parallel" in options:
        world, _, interleave = options["context_parallel"].partition(":")
        added.append(("ranks", f"{world}, {interleave} token{'' if interleave == '1' else 's'} in turn"))
    return [
        ("requests", f"{report['requests']:,} served, {report['preemptions']:,} preemptions"),
        ("steps", f"{report['steps']:,}, {report['virtual_s']:,.1f} s of virtual time, {report['wall_s']:.1f} s here"),
        ("tokens", f"{report['tokens']:,}: {parts}; {report['prefix_hit_tokens']:,} found in the prefix cache"),
        *added,
        ("widest row", f"{report['batch']['widest_row']:,} blocks{size}"),
        ("kernels", report["kernels"]),
        ("backend", f"{report['backend'] or 'none'}: {report['why']}"),
        ("verification", f"{checked['checked']:,} checked, {checked['failed']:,} failed"),
    ]


def _spreads(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    batch = report["batch"]
    rows = [
        ("requests", batch["requests"]),
        ("decodes", batch["decodes"]),
        ("prompt tokens", batch["prefill_tokens"]),
        ("metadata build, us", report["build_us"]),
    ]
    if report["attention_us"]:
        layers = report["options"]["layers"]
        rows.append((f"attention, us ({layers} layer{'s' if layers > 1 else ''})", report["attention_us"]))
    if "model_us" in report:
        rows.append(("the whole model, us", report["model_us"]))
    return rows


def verdict(report: dict[str, Any]) -> str:
    """One sentence that sums up the report."""
    checked, failed = report["verification"]["checked"], report["verification"]["failed"]
    if failed:
        return f"FAILED: {failed:,} of {checked:,} checks did not hold; the first of them are listed above."
    work = f"{report['requests']:,} requests were served in {report['steps']:,} steps."
    build_us = report["build_us"]["p50"]
    build = f"Working out where every token's key and value live took {build_us:.1f} us a step (median)"
    if "model_us" in report:
        model_us, error = report["model_us"]["p50"], report["verification"]["max_abs_error"]
        return (
            f"OK: {work} {build}, the model itself {model_us:,.0f} us, and in all {checked:,} results checked its "
            f"logits are those of the model alone (largest difference {error:.1e})."
        )
    if report["attention_us"] is None:
        return f"OK: {work} {build}, and in all {checked:,} steps checked it is what a plain recount gives."
    attention, error = report["attention_us"]["p50"], report["verification"]["max_abs_error"]
    return (
        f"OK: {work} {build}, the attention itself {attention:,.0f} us, and all {checked:,} results checked match "
        f"dense attention (largest difference {error:.1e})."
    )
