"""The child process of ``isolate``: ``python -m attncore.registry.doctor.child_main``.

Arguments: NAME DISTRIBUTION FILE [--create].

Writes a JSON object a line to FILE, each before what it announces is tried, so that the last line tells where it
stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, Any

from attncore.registry.host.host import Host
from attncore.registry.plugins import discover, load
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import smallest


def main(name: str, distribution: str, path: str, *options: str) -> None:
    """Examine the entry point ``name`` of ``distribution``."""
    with Path(path).open("w", encoding="utf-8") as file:
        record = next(
            one for one in discover.find() if (one.name, one.distribution, one.state) == (name, distribution, "found")
        )
        _tell(file, phase="spec")
        record = load.load(record)
        _tell(file, state=record.state, reasons=[reason.as_json() for reason in record.reasons])
        if record.spec is not None:
            _tell(file, phase="doctor")
            _tell(file, **_doctor(record))
            if "--create" in options:
                _tell(file, phase="create")
                _tell(file, **_create(record, record.spec))
        _tell(file, phase="done")


def _tell(file: IO[str], **answer: Any) -> None:
    file.write(json.dumps(answer, default=str) + "\n")
    file.flush()


def _doctor(record: PluginRecord) -> dict[str, Any]:
    import pluggy

    from attncore.registry.plugins.hookspecs import PROJECT, Hooks

    if record.entry_point is None:
        return {}
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(record.entry_point.load())
    try:
        answers = manager.hook.attncore_doctor(host=Host.probe())
        return {"facts": {str(key): str(value) for answer in answers for key, value in answer.items()}}
    except (Exception, SystemExit) as error:
        return _broken(record, f"attncore_doctor failed: {load.described(error)}")


def _create(record: PluginRecord, spec: BackendSpec) -> dict[str, Any]:
    """Make a small backend where this host can; why not otherwise."""
    from attncore.registry import requirements
    from attncore.registry.choice.negotiate import negotiate
    from attncore.registry.choice.negotiate_installed import Decision
    from attncore.registry.request import AttentionRequest

    form = spec.by_variant[0][1]
    heads: Any = form.head_sizes
    dtype = next(name for name in ("bfloat16", "float16", "float32") if name in form.dtypes)
    head_size = next((size for size in (128, 64) if size in heads), smallest(heads))
    names = tuple(sorted({requirements.parse(text).name for text in spec.all_requires}))
    host = Host.probe().with_packages(requirements.installed(names))
    caches = "auto" if "auto" in form.kv_cache_dtypes else min(form.kv_cache_dtypes)
    request = AttentionRequest(
        num_heads=1, num_kv_heads=1, head_size=head_size, dtype=dtype, kv_cache_dtype=caches, backend=spec.name
    )
    if len(form.phases) == 1:
        request = AttentionRequest(**{**vars(request), "phase": next(iter(form.phases))})
    outcome = negotiate(request, host, [record])
    choice = Decision(request, "the doctor", host, outcome).chosen
    if choice is None:
        mine = next(one for one in outcome.rest if one.name == spec.name)
        return {"created": f"not tried: {' | '.join(map(str, mine.reasons))}"}
    try:
        backend = choice.create()
    except (Exception, SystemExit) as error:
        return _broken(record, f"creating it failed: {load.described(error)}")
    return {"created": f"{type(backend).__name__} on {backend.config.device}"}


def _broken(record: PluginRecord, message: str) -> dict[str, Any]:
    fix = f"update {record.distribution}, or report it to its authors"
    return {"state": "broken", "reasons": [Reason("broken", message, source=record.label, fix=fix).as_json()]}


if __name__ == "__main__":
    main(*sys.argv[1:])
