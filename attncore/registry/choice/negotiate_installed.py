"""Negotiation among the installed plugins, with ATTNCORE_BACKEND, for ``select`` and `attncore explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Unpack, cast

from attncore import env
from attncore.did_you_mean import did_you_mean
from attncore.quoted import plain_text, quoted
from attncore.registry.choice.negotiate import Negotiation, negotiate
from attncore.registry.choice.negotiate_layers import LayersNegotiation, check_kinds, negotiate_layers
from attncore.registry.choice.negotiate_prefill_decode import JointNegotiation, negotiate_joint
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.request import AttentionRequest
from attncore.registry.request_fields import RequestFields

_FIELDS = {declared.name: declared for declared in fields(AttentionRequest)}
_REQUIRED = tuple(name for name, one in _FIELDS.items() if one.default is MISSING and one.default_factory is MISSING)

_HINTS = {"device": "; host=Host.assume('sm_90') names a machine, choice.create(device) a device of it"}
"""What states that which a request does not."""


def negotiate_installed(
    request: AttentionRequest | None = None, *, host: Host | None = None, **given: Unpack[RequestFields]
) -> Negotiation:
    """Negotiate for a request, given whole or as fields, on ``host`` (None: this machine). Errors as of ``select``."""
    request, asked_by = _request(request, given)
    plugins = registry()
    host = _host(host).with_packages(plugins.packages)
    return negotiate(request, host, plugins.records, asked_by)


def negotiate_installed_joint(
    request: AttentionRequest | None = None,
    *,
    host: Host | None = None,
    prefer_prefill: Iterable[str] = (),
    prefer_decode: Iterable[str] = (),
    **given: Unpack[RequestFields],
) -> JointNegotiation:
    """Negotiate for both phases together. Errors as of ``select_joint``."""
    request, asked_by = _request(request, given)
    plugins = registry()
    host = _host(host).with_packages(plugins.packages)
    prefill = replace(request, phase="prefill", prefer=_first("prefer_prefill", prefer_prefill, request.prefer))
    decode = replace(request, phase="decode", prefer=_first("prefer_decode", prefer_decode, request.prefer))
    return negotiate_joint(prefill, decode, host, plugins.records, asked_by)


def negotiate_installed_layers(
    kinds: Mapping[str, AttentionRequest], *, host: Host | None = None, **given: Unpack[RequestFields]
) -> LayersNegotiation:
    """Negotiate for the kinds of layers of one model together. Errors as of ``select_for_layers``."""
    if not isinstance(kinds, Mapping):
        raise TypeError(f"kinds: {quoted(kinds)} is not a mapping of kinds of layers to AttentionRequest")
    _check_names(given)
    requests, asked_by = {}, {}
    for name, request in kinds.items():
        if not (kind := plain_text(name)):
            raise TypeError(f"kinds: {quoted(name)} is not the name of a kind of layers")
        if not isinstance(request, AttentionRequest):
            raise TypeError(f"kinds[{quoted(kind)}]: {quoted(request)} is not an AttentionRequest")
        try:
            requests[kind], asked_by[kind] = _request(request, given)
        except (ValueError, TypeError) as error:
            raise type(error)(f"kinds[{quoted(kind)}].{error}") from error
    check_kinds(requests)
    plugins = registry()
    return negotiate_layers(requests, _host(host).with_packages(plugins.packages), plugins.records, asked_by)


def _host(host: Host | None) -> Host:
    if host is not None and not isinstance(host, Host):
        raise TypeError(f"host: {quoted(host)} is not a Host; Host.assume('sm_90') makes one")
    return host or Host.probe()


def _request(request: AttentionRequest | None, given: RequestFields) -> tuple[AttentionRequest, str]:
    """The request, and who named its backend."""
    if request is not None and not isinstance(request, AttentionRequest):
        raise TypeError(f"request: {quoted(request)} is not an AttentionRequest")
    _check_names(given)
    if request is None:
        missing = [name for name in _REQUIRED if name not in given]
        if missing:
            others = f", and {', '.join(missing[1:])}" if missing[1:] else ""
            raise TypeError(f"{missing[0]}: a request must state it{others}")
        request = AttentionRequest(**cast(dict[str, Any], given))
    elif given:
        request = replace(request, **cast(dict[str, Any], given))
    if request.backend is None and (named := env.backend()) is not None:
        return replace(request, backend=named), "ATTNCORE_BACKEND"
    return request, "the request"


def _check_names(given: Iterable[str]) -> None:
    for name in given:
        if name not in _FIELDS:
            hint = _HINTS.get(name) or did_you_mean(name, _FIELDS)
            raise TypeError(f"{name}: a request has no such field{hint}")


def _first(field: str, names: Iterable[str], rest: Iterable[str]) -> tuple[str, ...]:
    """``names`` before ``rest``, each once."""
    if isinstance(names, str):
        raise TypeError(f"{field}: {quoted(names)} is not a collection of names")
    return tuple(dict.fromkeys((*names, *rest)))
