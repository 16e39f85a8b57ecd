"""Metadata of which a backend can read the declared fields alone: what else it reads is named.

A spec declares what a backend reads (``host_needs``, ``device_needs``), and an engine's step may hold no more. Steps of
our builders hold every field, so that a backend which reads another one gives right numbers in all that runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from attncore.builder import CommonAttentionMetadata
from attncore.builder.fields import ARRAYS
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


def only_declared_fields(backend: AttentionBackend) -> AttentionBackend:
    """``backend``, whose ``plan`` and whose layers are handed metadata of the fields that its spec declares.

    Reading another one is a ConformanceError that names it. Methods are replaced on the object, so that builders, which
    call ``plan`` themselves, hand over no other metadata either.
    """
    spec = backend.spec
    if spec is None:
        return backend
    make = backend.impl

    @wraps(make)
    def impl(*given: Any, **features: Any) -> AttentionImpl:
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
        return method(*declared, **{name: _declared(one, spec) for name, one in named.items()})

    return guarded


def _declared(given: Any, spec: SpecFacts) -> Any:
    """``given``, of which the declared fields alone can be read where it is metadata. One object for each step."""
    if type(given) is _Declared or not isinstance(given, CommonAttentionMetadata):
        return given
    kept = vars(given).get("_declared")
    if kept is None or kept._real is not given:  # a copy has the original's
        kept = vars(given)["_declared"] = _Declared(given, spec)
    return kept


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
        if field in ARRAYS and field not in self._names:
            raise ConformanceError(
                f"it reads {self.of}.{name}, which its spec does not declare; add {field!r} to {self.where}, or do "
                "without it: a step of an engine may lack it"
            )
        return getattr(self._real, name)

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
