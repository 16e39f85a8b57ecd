"""Layers that a spec's ``check`` refuses: an engine asks for what its layers have, and does not come to make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from attncore.abstract import AttentionType
from attncore.abstract.scales import checked_scale, features_of
from attncore.registry.choice.reasons_against import reasons_against
from attncore.registry.reasons import FailedCheck
from attncore.testing.harness.errors import ConformanceError, UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.registry.choice.choice import Choice
    from attncore.registry.request import AttentionRequest


def asks_check_of_layers(backend: AttentionBackend, choice: Choice, plugin: str) -> AttentionBackend:
    """``backend``, made by ``choice``: a layer that it refuses by a ValueError, and the check of its variant too where
    it is asked for the layer's features, is an UnsupportedError. What the variant does not declare stays a ValueError.
    """
    make = backend.impl

    @wraps(make)
    def impl(*given: Any, **features: Any) -> AttentionImpl:
        try:
            return make(*given, **features)
        except ValueError as error:
            if why := _refusal(choice, features, plugin):
                raise UnsupportedError(why) from error
            raise

    vars(backend)["impl"] = impl
    return backend


def _refusal(choice: Choice, layer: Mapping[str, Any], plugin: str) -> str:
    """Why the check refuses the request with what a layer has; empty where it does not, or another fact does.
    ConformanceError where the check fails, which refuses nothing.
    """
    try:
        request = _with_features(choice, layer)
    except (TypeError, ValueError):  # a layer that makes no sense
        return ""
    reasons = reasons_against(choice.spec, request, choice.host, plugin, plugin)
    if any(reason.code != "check" for reason in reasons):
        return ""
    if (failed := next((reason for reason in reasons if isinstance(reason, FailedCheck)), None)) is not None:
        raise ConformanceError(failed.message)
    return "; ".join(map(str, reasons))


def _with_features(choice: Choice, layer: Mapping[str, Any]) -> AttentionRequest:
    request = choice.request
    given = {name: value for name, value in layer.items() if value is not None}
    asked: dict[str, Any] = {name: given[name] for name in ("sliding_window", "logits_soft_cap") if name in given}
    if "alibi_slopes" in given:
        asked["alibi"] = True if "alibi" in choice.spec.features else "standard"
    if "sinks" in given:
        asked["sinks"] = True
    needed = {*request.features}
    for name in {"k_scale", "v_scale"} & {*given}:
        needed.update(features_of(checked_scale(name, given[name], request.num_kv_heads)))
    attn_type = AttentionType(given.get("attn_type", AttentionType.DECODER))
    if attn_type is not AttentionType.DECODER:
        needed.add("encoder" if attn_type is not AttentionType.ENCODER_DECODER else "encoder_decoder")
    return dataclasses.replace(request, **asked, features=needed)
