"""The plugin and its spec: that they load, import nothing heavy, and make the backend that they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attncore.abstract import AttentionBackend, AttentionImpl
from attncore.quoted import quoted, type_name
from attncore.registry.child_process import read_answers, run_in_child
from attncore.registry.plugins.load import HEAVY_MODULES
from attncore.temporary_folder import temporary_folder
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_the_factory_makes_the_backend",
    "test_the_plugin_loads",
    "test_the_spec_is_read_without_heavy_imports",
]
_LIGHT = """
import json, sys
from attncore.registry.plugins import discover, load
records = [record for record in discover.find() if record.name == {name!r} and record.state == "found"]
heavy = {heavy!r}
listed = ",".join(name for name in heavy if name in sys.modules)
records = [load.load(record) for record in records]
spec = ",".join(name for name in heavy if name in sys.modules)
with open(sys.argv[1], "w") as file:
    json.dump(dict(listed=listed, spec=spec, states=",".join(record.state for record in records)), file)
"""


@covers("spec", apart=True)
def test_the_plugin_loads(attncore_subject: Subject) -> None:
    """The record is ``loaded``, without a warning."""
    try:
        record = attncore_subject.record
    except UnsupportedError as error:  # every other test is skipped for it, so one has to fail
        raise ConformanceError(str(error)) from error
    if record.state != "loaded":
        raise ConformanceError(f"the plugin is {record.state}: " + "; ".join(map(str, record.reasons)))
    # A heavy import shows only where nothing had imported that module before: the test of laziness always tells.


@covers("laziness", apart=True)
def test_the_spec_is_read_without_heavy_imports(attncore_subject: Subject) -> None:
    """In a fresh process, listing imports nothing of the plugin, and its spec imports no heavy library."""
    script = _LIGHT.format(name=attncore_subject.name, heavy=HEAVY_MODULES)
    with temporary_folder("spec") as folder:
        file = Path(folder, "answer")
        ended = run_in_child(["-c", script, str(file)], timeout=120)
        answers = read_answers(file)
    if ended or not answers:
        raise ConformanceError(f"reading the spec in a process of its own failed: {ended or 'it gave no answer'}")
    listed, spec, states = (answers[0][name] for name in ("listed", "spec", "states"))
    if listed:
        raise ConformanceError(f"listing alone imported {listed}")
    if spec:
        raise ConformanceError(f"reading the spec imported {spec}: import it in the factory's module only")
    if states != "loaded":
        raise ConformanceError(f"in a process of its own the plugin is {states or 'not there'}")


@covers("spec", apart=True)
def test_the_factory_makes_the_backend(attncore_subject: Subject) -> None:
    """What the spec's factory makes has the spec's name and an impl_class, and keeps the configuration."""
    backend: Any = attncore_subject.backend()
    if not isinstance(backend, AttentionBackend) or backend.name != attncore_subject.name:
        made = f"{type_name(backend)} named {quoted(backend.name)}"
        raise ConformanceError(f"the factory made {made}, not {attncore_subject.name!r}")
    if not issubclass(getattr(type(backend), "impl_class", object), AttentionImpl):
        raise ConformanceError("the class attribute impl_class must be a subclass of attncore.AttentionImpl")
    impl = backend.impl("layers.7", scale=0.25)
    if not isinstance(impl, AttentionImpl) or (impl.layer_name, impl.scale) != ("layers.7", 0.25):
        raise ConformanceError("backend.impl must make an AttentionImpl that keeps layer_name and scale")
    if impl.backend is not backend:
        raise ConformanceError("an AttentionImpl must keep the backend that made it, as `backend`")
