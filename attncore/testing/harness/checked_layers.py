"""Layers that a spec's ``check`` refuses: an engine asks for what its layers have, and does not come to make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from attncore.abstract import AttentionType
from attncore.abstract.scales import checked_scale, features_of
from attncore.registry.choice.choice import choose
from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.testing.harness.errors import UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.registry.host.host import Host
    from attncore.registry.request import AttentionRequest


def asks_check_of_layers(
    backend: AttentionBackend, request: AttentionRequest, host: Host | None = None
) -> AttentionBackend:
    """``backend``, made for ``request``: a layer that it refuses by a ValueError, and its spec's check too where it is
    asked for the layer's features, is an UnsupportedError. What the spec does not declare stays a ValueError.
    """
    make = backend.impl

    @wraps(make)
    def impl(*given: Any, **features: Any) -> AttentionImpl:
        try:
            return make(*given, **features)
        except ValueError as error:
            if why := _refusal(backend, request, features, host):
                raise UnsupportedError(why) from error
            raise

    vars(backend)["impl"] = impl
    return backend


def _refusal(backend: AttentionBackend, request: AttentionRequest, layer: Mapping[str, Any], host: Host | None) -> str:
    """Why check refuses ``request`` with what a layer has; empty where it does not, or another fact does."""
    try:
        negotiation = negotiate_installed(_with_features(backend, request, layer), host=host)
    except (TypeError, ValueError):  # a layer that makes no sense
        return ""
    if choose(negotiation) is not None:
        return ""
    reasons = [reason for one in negotiation.rejected if one.name == request.backend for reason in one.reasons]
    return "; ".join(map(str, reasons)) if all(reason.code == "check" for reason in reasons) else ""


def _with_features(backend: AttentionBackend, request: AttentionRequest, layer: Mapping[str, Any]) -> AttentionRequest:
    declared = () if backend.spec is None else backend.spec.features
    given = {name: value for name, value in layer.items() if value is not None}
    asked: dict[str, Any] = {name: given[name] for name in ("sliding_window", "logits_soft_cap") if name in given}
    if "alibi_slopes" in given:
        asked["alibi"] = True if "alibi" in declared else "standard"
    if "sinks" in given:
        asked["sinks"] = True
    needed = {*request.features}
    for name in {"k_scale", "v_scale"} & {*given}:
        needed.update(features_of(checked_scale(name, given[name], request.num_kv_heads)))
    attn_type = AttentionType(given.get("attn_type", AttentionType.DECODER))
    if attn_type is not AttentionType.DECODER:
        needed.add("encoder" if attn_type is not AttentionType.ENCODER_DECODER else "encoder_decoder")
    return dataclasses.replace(request, **asked, features=needed)
