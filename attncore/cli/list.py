"""List the attention backends that are installed, the state of each plugin, and the reasons for it.

Loads each plugin's light module in this process: this runs the plugin's code, and a plugin that hangs on import hangs
the command (`attncore doctor` loads each in a child process). ATTNCORE_PLUGINS and ATTNCORE_DISABLE_PLUGINS state what
may load.
"""

from __future__ import annotations

import argparse
from typing import Any

from attncore.cli.output import print_json, print_table, stdout_to_stderr
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print an array of backends as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a row per plugin; 0 whatever their states (`attncore doctor` reports findings)."""
    with stdout_to_stderr():
        records = registry().records
    if args.json:
        print_json([as_json(record) for record in records])
    elif records:
        headers = ("NAME", "DISTRIBUTION", "VERSION", "STATE", "DEVICES", "REASON")
        print_table(headers, [_row(record) for record in records])
    else:
        print("no backend is installed")
    return 0


def as_json(record: PluginRecord) -> dict[str, Any]:
    """A plugin's record as JSON types."""
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state,
        "factory": record.spec.factory if record.spec else None,
        "devices": dict(record.spec.devices) if record.spec else {},
        "variants": [name for name, _ in record.spec.by_variant if name] if record.spec else [],
        "requires": list(record.spec.all_requires) if record.spec else [],
        "reasons": [reason.as_json() for reason in record.reasons],
    }


def _row(record: PluginRecord) -> tuple[str, ...]:
    devices = ", ".join(record.spec.devices) if record.spec else ""
    reasons = " | ".join(str(reason) for reason in record.reasons)
    return (record.name, record.distribution, record.version, record.state, devices or "-", reasons)
