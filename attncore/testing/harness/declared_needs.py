"""Metadata of which a backend can read the declared fields alone: what else it reads is named.

A spec declares what a backend reads (``host_needs``, ``device_needs``), and an engine's step may hold no more. Steps of
our builders hold every field, so that a backend which reads another one gives right numbers in all that runs here.

A field that is not declared is handed out all the same, and named when the method has ended: what was written to it by
then is named as a write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attncore.builder import CommonAttentionMetadata
from attncore.builder.fields import ARRAYS, OPTIONAL
from attncore.testing.engines.left_alone import same_torch_settings
from attncore.testing.engines.metadata_snapshot import MetadataSnapshot, on_host
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl, SpecFacts

OTHER_NAMES = {
    "page_buffer": "paged_kv_indices",
    "block_tables": "block_table",
    "cross_block_tables": "cross_block_table",
}
"""Attributes of metadata that hand out a field under another name."""
OF_BACKENDS = ("plan", "prepare_capture", "record_plan")
OF_LAYERS = ("forward", "forward_with_lse", "write_cache")


class _Undeclared(NamedTuple):
    """A field that was handed out and is not declared: how it is said, and what it held."""

    what: str
    error: ConformanceError
    array: Any
    before: Any

    def finding(self, who: str) -> ConformanceError:
        """What the method ``who`` did with it."""
        if np.array_equal(on_host(self.array), self.before):
            return self.error
        return ConformanceError(
            f"{who} changed {self.what}; other layers and later steps read it: work on a copy (nor does its spec "
            "declare that it reads the field)"
        )


_handed_out: ContextVar[list[_Undeclared] | None] = ContextVar("_handed_out", default=None)
"""Undeclared fields of the method that runs; None outside of one."""


def only_declared_fields(backend: AttentionBackend) -> AttentionBackend:
    """``backend``, whose ``plan`` and whose layers are handed metadata of the fields that its spec declares.

    Reading another one is a ConformanceError that names it, and writing to it is one that says so; leaving torch's
    settings changed is one, too. Methods are replaced on the object, so that builders, which call ``plan`` themselves,
    hand over no other metadata either.
    """
    spec = backend.spec
    if spec is None:
        return backend
    make = backend.impl

    @wraps(make)
    def impl(*given: Any, **features: Any) -> AttentionImpl:
        with same_torch_settings("impl"):
            layer = make(*given, **features)
        _guard(layer, OF_LAYERS, spec)
        return layer

    _guard(backend, OF_BACKENDS, spec)
    vars(backend)["impl"] = impl
    return backend


def _guard(owner: Any, names: tuple[str, ...], spec: SpecFacts) -> None:
    for name in names:
        if hasattr(owner, name):
            vars(owner)[name] = _guarded(getattr(owner, name), spec)


def _guarded(method: Callable[..., Any], spec: SpecFacts) -> Callable[..., Any]:
    @wraps(method)
    def guarded(*given: Any, **named: Any) -> Any:
        declared = [_declared(one, spec) for one in given]
        undeclared: list[_Undeclared] = []
        fields = _of_a_builder(method.__name__, given)
        before = _handed_out.set(undeclared)
        try:
            with same_torch_settings(method.__name__):
                answer = method(*declared, **{name: _declared(one, spec) for name, one in named.items()})
        except Exception as error:
            if undeclared:
                raise _finding(undeclared, method.__name__) from error
            raise
        finally:
            _handed_out.reset(before)
        if undeclared:
            raise _finding(undeclared, method.__name__)
        if fields is not None:
            fields.check(method.__name__)
        return answer

    return guarded


def _of_a_builder(who: str, given: tuple[Any, ...]) -> MetadataSnapshot | None:
    """What the host has of a step that a builder plans itself, and that nothing else compares before and after."""
    step = given[0] if who == "plan" and given else None
    if not isinstance(step, CommonAttentionMetadata) or (step.builder is None and step.source is None):
        return None
    return MetadataSnapshot(step, sent=False)


def _finding(undeclared: list[_Undeclared], who: str) -> ConformanceError:
    """What is said of the fields: of one that was written to, else of the first."""
    found = [one.finding(who) for one in undeclared]
    return next((said for said, one in zip(found, undeclared, strict=True) if said is not one.error), found[0])


def _hand_out(what: str, error: ConformanceError, array: Any) -> None:
    """Note a field that is handed out; ``error`` where no more can be said: outside of a method, and where comparing
    would wait for a device that must not be waited for.
    """
    undeclared = _handed_out.get()
    on_gpu = isinstance(array, torch.Tensor) and array.is_cuda
    if undeclared is None or (
        on_gpu and (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())
    ):
        raise error
    undeclared.append(_Undeclared(what, error, array, np.array(on_host(array))))


def _declared(given: Any, spec: SpecFacts) -> Any:
    """``given``, of which the declared fields alone can be read where it is metadata. One object for each step and
    spec, since a profiling run is of the backends of all groups.
    """
    if type(given) is _Declared or not isinstance(given, CommonAttentionMetadata):
        return given
    real, kept = vars(given).get("_declared", (None, {}))
    if real is not given:  # a copy has the original's
        kept = {}
        vars(given)["_declared"] = given, kept
    found = kept.get(id(spec))  # which keeps the spec
    if found is None:
        found = kept[id(spec)] = _Declared(given, spec)
    return found


class _Fields:
    """Hands on what is asked of ``real``, but for fields that are not among ``declared`` (the spec's ``where``)."""

    __slots__ = ("__weakref__", "_names", "_real", "_spec")
    where, of = "host_needs", "metadata.host"

    def __init__(self, real: Any, spec: SpecFacts) -> None:
        for name, value in (("_real", real), ("_spec", spec), ("_names", frozenset(getattr(spec, self.where)))):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # what takes metadata of a step takes this
        real: type[Any] = self._real.__class__
        return real

    def __getattr__(self, name: str) -> Any:
        field = OTHER_NAMES.get(name, name)
        if field not in ARRAYS or field in self._names:
            return getattr(self._real, name)
        error = ConformanceError(
            f"it reads {self.of}.{name}, which its spec does not declare; add {field!r} to {self.where}, or do "
            "without it: a step of an engine may lack it"
        )
        try:
            found = getattr(self._real, name)
        except AttributeError:
            if field in OPTIONAL:  # whoever asks for one has to take a step without it
                raise
            raise error from None
        _hand_out(f"{self.of}.{name}", error, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._real, name)

    def __dir__(self) -> list[str]:
        return dir(self._real)

    def __copy__(self) -> Any:
        return self._real.__copy__()


class _Declared(_Fields):
    __slots__ = ("_host",)
    where, of = "device_needs", "metadata"

    def __init__(self, real: Any, spec: SpecFacts) -> None:
        super().__init__(real, spec)
        object.__setattr__(self, "_host", None)

    @property
    def host(self) -> Any:
        real = self._real.host
        if self._host is None or self._host._real is not real:
            object.__setattr__(self, "_host", _Fields(real, self._spec))
        return self._host

    @property
    def prefill_metadata(self) -> Any:
        return _declared(self._real.prefill_metadata, self._spec)

    @property
    def decode_metadata(self) -> Any:
        return _declared(self._real.decode_metadata, self._spec)

    @property
    def groups(self) -> Any:
        return {name: _declared(group, self._spec) for name, group in self._real.groups.items()}
