"""The child process of ``diagnose``, started with the arguments NAME DISTRIBUTION FILE [--create].

Writes JSON Lines to FILE. A phase is written before it begins, so that the last line tells where the process stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from attncore.process_end import run_as_child
from attncore.quoted import MOST, describe_error, one_line, type_name
from attncore.registry import package_requirements
from attncore.registry.child_process import tell
from attncore.registry.choice.choice import choose
from attncore.registry.choice.device_here import host_device_problem
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.choice.runs_here import reasons_here, request_here
from attncore.registry.host.host import Host
from attncore.registry.plugins import discover, load
from attncore.registry.plugins.plugin_code import run_plugin_code
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.plain_values import MAX_ENTRIES


def main(name: str, distribution: str, path: str, *options: str) -> None:
    """Diagnose the entry point ``name`` of ``distribution``; the lines are written to ``path``."""
    file = Path(path)
    of_both = (name, distribution)
    found = (one for one in discover.find() if (one.name, one.distribution) == of_both and one.state == "found")
    if (record := next(found, None)) is None:
        tell(file, phase="done", state="broken", reasons=[_not_found(name, distribution).as_json()])
        return
    tell(file, phase="spec")
    record = load.load(record)
    tell(file, state=record.state, reasons=[reason.as_json() for reason in record.reasons])
    if record.spec is not None:
        names = tuple(sorted({package_requirements.parse(text).name for text in record.spec.all_requires}))
        host = Host.probe().with_packages(package_requirements.installed(names))
        missing = [reason.as_json() for reason in reasons_here(record, host)]
        tell(file, variables=dict(record.spec.variables), missing=missing, requires=names)
        tell(file, phase="doctor")
        tell(file, **run_plugin_code(record.label, _doctor, record))
        if "--create" in options:
            tell(file, phase="create")
            tell(file, **_create(record, record.spec, host))
    tell(file, phase="done")


def _not_found(name: str, distribution: str) -> Reason:
    """What the process that asks finds by a finder of its own, and this one does not."""
    message = "a process of its own does not find it, where Python searches by itself"
    return Reason("broken", message, source=f"{name} ({distribution})", fix=f"install {distribution} with pip")


def _doctor(record: PluginRecord) -> dict[str, Any]:
    import pluggy

    from attncore.registry.plugins.hookspecs import PROJECT, Hooks

    if record.entry_point is None:
        return {}
    try:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        manager.register(record.entry_point.load())
        answers = manager.hook.attncore_doctor(host=Host.probe())
        if wrong := [answer for answer in answers if not isinstance(answer, Mapping)]:
            raise TypeError(
                f"it returned an object of type {type_name(wrong[0])}; it must return a mapping of names to texts"
            )
        items = [(key, answer[key]) for answer in answers for key in islice(answer, MAX_ENTRIES)]
        return {"facts": {one_line(key, MOST): one_line(value, MOST) for key, value in items}}
    except BaseException as error:  # nothing interrupts this process but its plugin
        return _broken(record, f"attncore_doctor failed: {describe_error(error)}")


def _create(record: PluginRecord, spec: BackendSpec, host: Host) -> dict[str, Any]:
    """Create a small backend where this host can."""
    choice = choose(negotiate(request_here(spec, record.label, host), host, [record], "the doctor"))
    if choice is None:
        return {}
    if problem := host_device_problem(host):
        return {"missing": [Reason("requirement", problem, "torch", None, "torch").as_json()]}
    try:
        backend = choice.create()
        variant = f", variant {choice.candidate.variant_label}" if choice.variant else ""
        return {"created": one_line(f"{type_name(backend)} on {backend.config.device}{variant}")}
    except BaseException as error:
        return _broken(record, f"creating it failed: {describe_error(error)}")


def _broken(record: PluginRecord, message: str) -> dict[str, Any]:
    fix = f"update {record.distribution}, or report it to its authors"
    return {"state": "broken", "reasons": [Reason("broken", message, source=record.label, fix=fix).as_json()]}


if __name__ == "__main__":
    run_as_child(main)
