"""Check the installation: versions, the compiled kernels, environment variables, the host, and every plugin.

Each plugin is loaded, its doctor hook called and (unless --no-create) its backend created in a child process with a
time limit, so that one that hangs or crashes is a row. Exits with 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterator
from typing import Any

from attncore import env
from attncore._version import __version__
from attncore.cli.output import print_table
from attncore.cli.progress_bar import said_meanwhile
from attncore.did_you_mean import did_you_mean
from attncore.json_output import print_json
from attncore.quoted import listed, one_line
from attncore.registry.child_process import run_in_child
from attncore.registry.doctor.diagnose_plugin import Diagnosis, diagnose
from attncore.registry.host.host import Host
from attncore.registry.plugins import discover
from attncore.terminal import print_lines
from attncore.versions import PACKAGES, version_of

_READS_INTS = re.compile(r" \(reads Python ints by [^()]*\)")
"""What says something to attncore's developers alone: --json has it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each plugin (default 60)")
    parser.add_argument("--no-create", action="store_true", help="read specs only; import no kernel library but torch")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 where there is a finding."""
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout: {args.timeout:g} is not a positive number of seconds")
    plugins, records = "", []
    try:
        records = discover.find()
    except ValueError as error:  # a bad value of a variable that says what may load: then nothing may
        plugins = f"no plugin is loaded: {error}"
    rows = []
    for record in records:
        with said_meanwhile(f"checking {one_line(record.name)}"):
            rows.append(diagnose(record, timeout=args.timeout, create=not args.no_create))
    problems = env.problems({row.record.name: row.variables for row in rows})
    declared = {*env.VARIABLES, *(name for row in rows for name in row.variables or ())}
    kernels, kernels_fine = _kernels()
    findings = [*problems.values(), *_unmatched(rows), *_broken(rows), *_cannot_run(rows, kernels_fine)]
    findings += [] if not args.no_create else _torch(rows, args.timeout)
    if not kernels_fine and kernels not in problems.values():
        findings.append(f"kernels: {kernels}")
    if plugins and plugins.partition(": ")[2] not in problems.values():
        findings.append(plugins)
    report = {
        "attncore": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "kernels": kernels,
        "environment": {name: one_line(text) for name, text in env.values(sorted(declared)).items()},
        "host": Host.probe().as_json(),
        "backends": [row.as_json() for row in rows],
        "findings": findings,
    }
    if args.json:
        print_json(report)
    else:
        _print(report, rows, plugins)
    return 1 if findings else 0


def _kernels() -> tuple[str, bool]:
    try:
        from attncore.kernels import why_kernels

        return why_kernels(), True
    except (ImportError, ValueError) as error:
        return str(error).removeprefix("kernels: "), False


def _unmatched(rows: list[Diagnosis]) -> list[str]:
    """Names in ATTNCORE_BACKEND, ATTNCORE_PLUGINS and ATTNCORE_DISABLE_PLUGINS that no plugin has."""
    try:
        lists = {
            "ATTNCORE_BACKEND": frozenset(name for name in [env.backend()] if name),
            "ATTNCORE_PLUGINS": env.plugins() or frozenset(),
            "ATTNCORE_DISABLE_PLUGINS": env.disabled_plugins(),
        }
    except ValueError:
        return []
    names = {row.record.name for row in rows}
    return [
        f"{variable}: no plugin is named {name!r}; installed: {listed(sorted(names))}{did_you_mean(name, names)}"
        for variable, wanted in lists.items()
        for name in sorted(wanted - names)
    ]


def _broken(rows: list[Diagnosis]) -> list[str]:
    return [
        f"{row.record.name} ({row.record.label}): {reason}"
        for row in rows
        for reason in row.record.reasons
        if row.record.state in ("duplicate", "broken", "incompatible") or reason.code == "heavy_import"
    ]


def _torch(rows: list[Diagnosis], timeout: float) -> list[str]:
    """That torch cannot be imported, where a backend that can run here needs it; creating the backend would tell."""
    if not any("torch" in row.requires and row.runs_here for row in rows):
        return []
    why = run_in_child(["-c", "import torch"], timeout)
    return [f"torch: {version_of('torch')} is installed and cannot be imported: {why}; reinstall it"] if why else []


def _cannot_run(rows: list[Diagnosis], kernels_fine: bool) -> Iterator[str]:
    """Backends for a device of this host that lack something; and that there is none left to run attention."""
    cannot = "metadata can be built, attention cannot" if kernels_fine else "neither metadata nor attention can be run"
    for row in rows:
        if row.record.state == "loaded" and any(reason.code != "device" for reason in row.missing):
            yield f"{row.record.name} ({row.record.label}): {row.created}"
    if not any(row.runs_here for row in rows):
        yield f"no backend can run here: {cannot}; the reasons are above"


def _print(report: dict[str, Any], rows: list[Diagnosis], plugins: str) -> None:
    host = report["host"]
    facts = [
        ("attncore", report["attncore"]),
        ("python", report["python"]),
        ("platform", report["platform"]),
        ("kernels", _READS_INTS.sub("", report["kernels"])),
        ("host", " ".join(str(host[key]) for key in ("device", "device_name", "driver") if host[key])),
        *(("note", note) for note in host["notes"]),
        *((name, version or "not installed") for name, version in report["packages"].items()),
        *report["environment"].items(),
    ]
    print_table(("WHAT", "FOUND"), facts)
    print()
    if plugins:
        print_lines(one_line(plugins))
    elif rows:
        headers = ("NAME", "DISTRIBUTION", "VERSION", "STATE", "SECONDS", "RESULT")
        print_table(headers, [_row(row) for row in rows])
        if any(row.facts for row in rows):
            print()
        for row in rows:
            for key, value in row.facts.items():
                what = key if key.partition(" ")[0] == row.record.name else f"{row.record.name}: {key}"
                print_lines(one_line(f"note: {what}: {value}"))
    else:
        print("no plugin is installed")
    print()
    for finding in report["findings"]:
        print_lines(one_line(f"finding: {finding}"))
    if not report["findings"]:
        print("no findings")


def _row(row: Diagnosis) -> tuple[str, ...]:
    record = row.record
    words = " | ".join(part for part in (row.created, *map(str, record.reasons)) if part)
    return (record.name, record.distribution, record.version, record.state, f"{row.seconds:.1f}", words)
