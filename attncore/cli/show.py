"""Show what a backend has: every fact of its spec and of each variant, with what it means, and whether it runs here.

Nothing of its library is imported: it is what the plugin declares, which `attncore verify` and the conformance kit put
to the test. Devices are sorted, with their priorities: where several entries match a device, the closest one counts, as
cuda:sm_90 before cuda:sm_80+. With --all, a row for each backend; with --markdown, the capability matrix of all:
hardware, features, sizes, and why not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attncore.cli.argument_types import backend_name
from attncore.cli.installed_backends import not_installed
from attncore.cli.output import print_table
from attncore.command import UsageError, name_in_place_of
from attncore.json_output import print_json
from attncore.quoted import listed
from attncore.registry import package_requirements
from attncore.registry.choice.capability_matrix import columns, markdown
from attncore.registry.choice.runs_here import reasons_by_variant, reasons_here
from attncore.registry.device_patterns import without_contained
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.facts import by_variant, facts_as_json, feature_states, plain_facts
from attncore.standard_output import stdout_to_stderr
from attncore.terminal import print_lines


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    name_in_place_of(parser, backend="the argument NAME")
    parser.add_argument(
        "name", type=backend_name, metavar="NAME", nargs="?", help="the backend, as `attncore list` prints it"
    )
    parser.add_argument("--all", action="store_true", help="show every backend that is installed")
    parser.add_argument("--markdown", action="store_true", help="with --all: the capability matrix as Markdown")
    parser.add_argument("--json", action="store_true", help="print the backend, or with --all an array, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was asked; 3 where NAME is not installed, 1 where its plugin is not loaded."""
    if args.name is None and not args.all:
        raise UsageError("NAME: none given; name a backend of `attncore list`, or give --all")
    if args.name is not None and args.all:
        raise UsageError("--all: not with NAME, which shows one backend")
    if args.markdown and (args.json or not args.all):
        raise UsageError("--markdown: only with --all, and not with --json")
    with stdout_to_stderr():  # a plugin's own check may print
        plugins = registry()
        host = Host.probe().with_packages(plugins.packages)
        records = [record for record in plugins.records if args.name in (None, record.name)]
        if not records and args.name is not None:
            raise not_installed("NAME", args.name)
        show = _printer(args, records, host)
    show()
    return 0 if args.all or all(record.spec is not None for record in records) else 1


def _printer(args: argparse.Namespace, records: Sequence[PluginRecord], host: Host) -> Callable[[], None]:
    """What prints the answer, which is ready: it runs no plugin's code."""
    if args.json:
        described = [describe(record, host) for record in records]
        return partial(print_json, described if args.all or len(described) > 1 else described[0])
    if args.markdown:
        return partial(print, markdown(records), end="")
    if args.all:
        return partial(print_table, _HEADERS, list(_rows(records, host)))
    pages = [(list(_heading(record, host)), list(_tables(record, host))) for record in records]
    return partial(_print, pages)


def describe(record: PluginRecord, host: Host) -> dict[str, Any]:
    """A backend as JSON types: who provides it, whether it runs on ``host``, its spec, and each variant's."""
    reasons = reasons_here(record, host)
    spec = record.spec
    of_variants = reasons_by_variant(record, host)
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state,
        "device": host.device,
        "runs_here": not reasons,
        "reasons": [reason.as_json() for reason in (*record.reasons, *(reasons if spec else ()))],
        "spec": facts_as_json(spec) if spec else None,
        "requires": {text: _installed(text, host) for text in spec.all_requires} if spec else {},
        "variants": [
            {
                "name": name,
                "runs_here": not of_variants[name],
                "reasons": [reason.as_json() for reason in of_variants[name]],
                "spec": facts_as_json(stated),
            }
            for name, stated in (spec.by_variant if spec else ())
            if name
        ],
    }


_HEADERS = ("BACKEND", "VARIANT", "RUNS", "DEVICES", "DTYPES", "HEAD SIZES", "GRAPHS", "FEATURES")


def _rows(records: Sequence[PluginRecord], host: Host) -> Iterator[tuple[str, ...]]:
    """A row for each variant of each backend that is loaded."""
    runs = {
        (record.name, name): not why for record in records for name, why in reasons_by_variant(record, host).items()
    }
    for column in columns(records):
        facts, states = plain_facts(column.spec), feature_states(column.spec)
        yield (
            column.backend,
            column.variant or "-",
            "yes" if runs[column.backend, column.variant] else "no",
            ", ".join(without_contained(column.spec.devices)),
            facts["dtypes"],
            facts["head_sizes"],
            column.spec.cuda_graph,
            listed(name for name, (state, _) in states.items() if state == "yes"),
        )


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _print(pages: Sequence[tuple[Sequence[str], Sequence[Table]]]) -> None:
    for lines, tables in pages:
        for line in lines:
            print_lines(line)
        for headers, rows in tables:
            if rows:
                print()
                print_table(headers, rows)


def _heading(record: PluginRecord, host: Host) -> Iterator[str]:
    reasons = reasons_here(record, host)
    can = "cannot" if reasons else "can"
    yield f"{record.name} ({record.label}): {record.state}; it {can} run on {host.device}"
    for reason in dict.fromkeys(map(str, (*record.reasons, *reasons))):
        yield f"  {reason}"


def _tables(record: PluginRecord, host: Host) -> Iterator[Table]:
    """The tables of one backend, headers and rows."""
    if (spec := record.spec) is None:
        return
    if spec.variants:
        runs = reasons_by_variant(record, host)
        yield (
            ("VARIANT", "RUNS", "WHY NOT"),
            [(name, "no" if why else "yes", " | ".join(map(str, why))) for name, why in runs.items()],
        )
    yield _of_variants(spec, "FACT", "VALUE", plain_facts)
    for header, second, state in _STATES:
        yield _of_variants(spec, header, second, partial(_of_state, state))
    options = {name: option for _, stated in spec.by_variant for name, option in stated.options.items()}
    yield (
        ("OPTION", "TYPE", "DEFAULT", "VALUES", "MEANING"),
        [
            (name, one.type.__name__, str(one.default), ", ".join(map(str, one.choices)) or "any", one.help)
            for name, one in options.items()
        ],
    )
    yield ("VARIABLE", "MEANING"), list(spec.variables.items())
    yield _of_variants(spec, "REQUIRES", "INSTALLED", partial(_requirements, host))
    notes = by_variant(spec, lambda stated: dict.fromkeys(stated.notes, ""))
    yield ("VARIANTS", "NOTE"), [(variants or "all", note) for note, variants, _ in notes]


_STATES = (("FEATURE", "MEANING", "yes"), ("NOT SUPPORTED", "WHY", "no"), ("NOT DECLARED", "MEANING", "not declared"))


def _of_variants(
    spec: BackendSpec, subject: str, value: str, read: Callable[[BackendSpec], Mapping[str, str]]
) -> Table:
    """A row for each name and value; a column says which variants have it, where a spec has variants."""
    rows = by_variant(spec, read)
    if not spec.variants:
        return (subject, value), [(name, text) for name, _, text in rows]
    return (subject, "VARIANTS", value), [(name, variants or "all", text) for name, variants, text in rows]


def _of_state(wanted: str, spec: BackendSpec) -> dict[str, str]:
    return {name: text for name, (state, text) in feature_states(spec).items() if state == wanted}


def _requirements(host: Host, spec: BackendSpec) -> dict[str, str]:
    return {text: _installed(text, host) for text in spec.requires}


def _installed(text: str, host: Host) -> str:
    """The version that is installed of what a requirement names, and whether it is accepted."""
    version = host.packages.get(package_requirements.parse(text).name, "")
    if not version:
        return "not installed"
    return version if package_requirements.satisfied(text, version) else f"{version}, which is not accepted"
