"""List the attention backends that are installed, the state of each plugin, whether it runs here, and why not.

Loads each plugin's light module in this process: this runs the plugin's code, and a plugin that hangs on import hangs
the command (`attncore doctor` loads each in a child process). ATTNCORE_PLUGINS and ATTNCORE_DISABLE_PLUGINS state what
may load.

DEVICES are sorted and have no priorities, which `attncore show` prints: what an entry such as cuda:sm_80+ contains is
not named again.
"""

from __future__ import annotations

import argparse
from typing import Any

from attncore.cli.output import print_table
from attncore.registry.choice.installed import HEADERS, row
from attncore.registry.choice.runs_here import reasons_here
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.standard_output import stdout_to_stderr
from attncore.terminal import print_lines


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print an array of backends as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a row per plugin; 0 whatever their states (`attncore doctor` reports findings)."""
    with stdout_to_stderr():
        plugins = registry()
        host = Host.probe().with_packages(plugins.packages)
        rows = [(record, reasons_here(record, host)) for record in plugins.records]
    if args.json:
        from attncore.json_output import print_json

        print_json([as_json(record, missing) for record, missing in rows])
    elif rows:
        print_table(HEADERS, [row(record, missing) for record, missing in rows])
    else:
        print("no backend is installed")
    lacking = [name for name in KNOWN if name not in {record.name for record in plugins.records}]
    if lacking and rows and not args.json:
        print_lines(f"not installed: {', '.join(lacking)}; attncore explain says how")
    return 0


def as_json(record: PluginRecord, missing: tuple[Reason, ...]) -> dict[str, Any]:
    """A plugin's record as JSON types, with the reasons why it cannot run here."""
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state,
        "runs_here": not missing,
        "factory": record.spec.factory if record.spec else None,
        "devices": record.spec.all_devices if record.spec else {},
        "variants": [name for name, _ in record.spec.by_variant if name] if record.spec else [],
        "requires": list(record.spec.all_requires) if record.spec else [],
        "variables": dict(record.spec.variables) if record.spec else {},
        "reasons": [reason.as_json() for reason in record.reasons],
        "missing": [reason.as_json() for reason in missing if record.spec],
    }
