"""The report of a replay as JSON types, from which its table, its plots and its page are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.quoted import one_line
from attncore.replay.results.measurements import microseconds, quantiles, total
from attncore.replay.results.series import histogram, timeline
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.replay.results.measurements import Outcome

TERMS = {
    "build": "working out the metadata: where every token's key and value live",
    "cold": "as in an engine: what ran between two builds has filled the processor's caches",
    "hot": "the same steps with only the scheduler between two builds, as in a loop of builds",
    "plan": "what the backend prepares in the same call for its kernels; no part of the build",
    "attention": "{layers}, until each call returned; on a GPU kernels may still run then",
    "model": "a forward pass of the whole model, until its device is done",
    "p50, p90, p99": "50, 90 and 99 of 100 steps are at or below this",
}
"""What the rows and columns of the table mean."""
_HOT_ALONE = "with only the scheduler between two builds, as in a loop of builds"
"""The same of ``hot`` where nothing is cold."""


def as_json(
    outcome: Outcome,
    *,
    trace: dict[str, str],
    options: dict[str, Any],
    layers: str | None,
    backend: str | None,
    why: str,
    environment: dict[str, Any],
) -> Any:
    """The report as JSON types. ``build_us``, ``plan_us``, ``attention_us``, ``build_histogram`` and ``wall_s`` are
    times; ``environment`` (versions, host, device) is of the machine; nothing else depends on it. ``build_us.cold``,
    ``attention_us`` and ``verification.max_abs_error`` are null where only metadata was built, ``plan_us`` where the
    backend plans nothing; a model's time is ``model_us``, and ``layers`` says how many attend, of which class."""
    steps, verification = outcome.steps, outcome.verification
    prefill, decode = total(steps.prefill_tokens), total(steps.decode_tokens)
    # Only of a run that has it: reports of others stay as they were.
    added: dict[str, Any] = {}
    if "speculative" in options:
        added["speculative"] = {"drafted": steps.drafted, "accepted": steps.accepted}
    if "groups" in options:
        added["passed_blocks"] = steps.passed_blocks
    forward = microseconds(steps.attention_ns) if steps.attention_ns else None
    cold = steps.build_ns if forward else steps.build_ns[:0]
    if "model" in options:
        added["layers"], added["model_us"], forward = layers, forward, None
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
        "build_us": {"cold": microseconds(cold) if cold else None, "hot": microseconds(outcome.hot_build_ns)},
        "plan_us": microseconds(steps.plan_ns) if steps.plan_ns else None,
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
        **environment,
        "wall_s": outcome.wall_seconds,
        "timeline": timeline(steps),
        "build_histogram": histogram(cold, outcome.hot_build_ns),
    }


def title(trace: dict[str, str]) -> str:
    """What was replayed: the trace and its format, or that it is synthetic."""
    if trace["format"] == "synthetic":
        return "Replay of a synthetic workload"
    return f"Replay of {one_line(trace['source'])} ({trace['format']})"


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What was replayed, on what and how it went: names and texts."""
    checked = report["verification"]
    parts = f"{report['prefill_tokens']:,} of prompts, {report['decode_tokens']:,} decoded"
    options = report["options"]
    size = f" of {counted(options['block_size'], 'token')}" if options["block_size"] else ""
    added = []
    if "groups" in options:
        added.append(
            ("groups", f"{options['groups']}; {counted(report['passed_blocks'], 'block', spec=',')} passed by windows")
        )
    if "speculative" in options:
        drafts = report["speculative"]
        added.append(("drafts", f"{drafts['drafted']:,} run, {drafts['accepted']:,} accepted"))
    if "context_parallel" in options:
        world, _, interleave = options["context_parallel"].partition(":")
        added.append(("ranks", f"{world}, {counted(int(interleave), 'token')} in turn"))
    host, wall_s = report["host"], report["wall_s"]
    here = f"{wall_s:.1f} s here" if wall_s >= 0.1 else f"{wall_s * 1000:.0f} ms here"
    return [
        ("requests", f"{report['requests']:,} served, {counted(report['preemptions'], 'preemption', spec=',')}"),
        ("steps", f"{report['steps']:,}, {report['virtual_s']:,.1f} s of virtual time, {here}"),
        ("tokens", f"{report['tokens']:,}: {parts}; {report['prefix_hit_tokens']:,} found in the prefix cache"),
        *added,
        ("widest row", f"{counted(report['batch']['widest_row'], 'block', spec=',')}{size}"),
        *([("layers", report["layers"])] if "layers" in report else []),
        ("kernels", report["kernels"]),
        ("backend", f"{report['backend'] or 'none'}: {report['why']}"),
        ("device", report["device"]),
        ("host", f"{host['cpu']}, {counted(host['cores'], 'core')}"),
        ("verification", f"{_what_is_checked(report)} checked, {checked['failed']:,} failed"),
    ]


def _what_is_checked(report: dict[str, Any]) -> str:
    number = report["verification"]["checked"]
    if report["build_us"]["cold"] is None:
        return counted(number, "step's metadata", "steps' metadata", spec=",")
    what = "the model" if "model" in report["options"] else "attention"
    return f"{counted(number, 'result', spec=',')} of {what}"


def spreads(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the table, times first: names, and p50, p90, p99 and max."""
    build, batch = report["build_us"], report["batch"]
    times = [
        ("build, cold", build["cold"]),
        ("build, hot", build["hot"]),
        ("plan", report["plan_us"]),
        ("attention", report["attention_us"]),
        ("model", report.get("model_us")),
    ]
    return [
        *((f"{name}, us", values) for name, values in times if values),
        ("requests", batch["requests"]),
        ("decodes", batch["decodes"]),
        ("prompt tokens", batch["prefill_tokens"]),
    ]


def terms(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Those of TERMS that the table of this report has."""
    present = {
        "cold": report["build_us"]["cold"],
        "plan": report["plan_us"],
        "attention": report["attention_us"],
        "model": report.get("model_us"),
    }
    layers = counted(report["options"]["layers"], "layer")
    texts = TERMS if present["cold"] else TERMS | {"hot": _HOT_ALONE}
    return [(name, text.format(layers=layers)) for name, text in texts.items() if present.get(name, True)]


def figure(value: float) -> str:
    """A number of the table."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _all(number: int, what: str) -> str:
    """``all 17 steps``, ``the one step``."""
    return f"the one {what}" if number == 1 else f"all {number:,} {what}s"


def verdict(report: dict[str, Any]) -> str:
    """One sentence that sums up the report."""
    checked, failed = report["verification"]["checked"], report["verification"]["failed"]
    if failed:
        first = "it is" if failed == 1 else "the first of them are"
        return f"FAILED: {failed:,} of {counted(checked, 'check', spec=',')} did not hold; {first} listed above."
    served = f"{counted(report['requests'], 'request', spec=',')} {'was' if report['requests'] == 1 else 'were'}"
    work = f"{served} served in {counted(report['steps'], 'step', spec=',')}."
    build_us = report["build_us"]
    build = "Working out where every token's key and value live took {:.1f} us a step (median)"
    if build_us["cold"] is None:
        build = build.format(build_us["hot"]["p50"])
        return f"OK: {work} {build}, and in {_all(checked, 'step')} checked it is what a plain recount gives."
    build = f"{build.format(build_us['cold']['p50'])}, {build_us['hot']['p50']:.1f} us with warm caches"
    error = report["verification"]["max_abs_error"]
    if "model_us" in report:
        return (
            f"OK: {work} {build}, the model itself {report['model_us']['p50']:,.0f} us, and in "
            f"{_all(checked, 'result')} checked its logits are those of the model alone "
            f"(largest difference {error:.1e})."
        )
    attention = report["attention_us"]["p50"]
    slow = " (slow, because reference is plain torch)" if report["backend"] == "reference" else ""
    return (
        f"OK: {work} {build}, the attention itself {attention:,.0f} us{slow}, and {_all(checked, 'result')} checked "
        f"{'matches' if checked == 1 else 'match'} dense attention (largest difference {error:.1e})."
    )
