"""``select``, ``select_joint`` and ``select_for_layers``: what an engine calls."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Unpack

from attncore.did_you_mean import close_name
from attncore.errors import FallbackWarning, NoBackendError
from attncore.logged import logged
from attncore.quoted import quoted
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.choice import Choice, choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.layers_choice import LayersChoice, choose_layers
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.negotiate_installed import (
    negotiate_installed,
    negotiate_installed_joint,
    negotiate_installed_layers,
)
from attncore.registry.choice.prefill_decode_choice import JointChoice, choose_joint
from attncore.registry.host.host import Host
from attncore.registry.request import AttentionRequest
from attncore.registry.request_fields import RequestFields
from attncore.show import counted

logger = logging.getLogger("attncore")


def select(
    request: AttentionRequest | None = None, /, *, host: Host | None = None, **fields: Unpack[RequestFields]
) -> Choice:
    """The backend for a request, given whole or as its fields (fields given beside a request replace its own).

    Of the fields ``num_heads``, ``num_kv_heads``, ``head_size`` and ``dtype`` are required; the others are those of
    ``help(attncore.AttentionRequest)``.

    ``host`` is this machine unless another is given. ATTNCORE_BACKEND names the backend where the request names none.
    The choice is a line of the logger ``attncore`` at INFO; where another backend takes the place of the one named
    (policy ``fallback``), it is a FallbackWarning too. Raises ValueError or TypeError naming the field for a bad
    request, and NoBackendError where no backend can be used, with every candidate and all its reasons; of a backend
    that is named, and whose place no other may take, with the reasons against it alone.
    """
    negotiation = negotiate_installed(request, host=host, **fields)
    _tell(negotiation)
    choice = choose(negotiation)
    if choice is None:
        if negotiation.request.backend and negotiation.request.policy == "strict":  # it comes first
            negotiation = replace(negotiation, usable=(), rejected=negotiation.rejected[:1])
        raise NoBackendError(f"{negotiation.refusal}\n{explain(negotiation)}")
    return choice


def select_joint(
    request: AttentionRequest | None = None,
    /,
    *,
    host: Host | None = None,
    prefer_prefill: Iterable[str] = (),
    prefer_decode: Iterable[str] = (),
    **fields: Unpack[RequestFields],
) -> JointChoice:
    """A backend for prefill and one for decode, perhaps the same, with one block size, one layout and one cache dtype.

    ``prefer_prefill`` and ``prefer_decode`` come before the request's ``prefer``. Errors as of ``select``.
    """
    joint = negotiate_installed_joint(
        request, host=host, prefer_prefill=prefer_prefill, prefer_decode=prefer_decode, **fields
    )
    choice = choose_joint(joint)
    if choice is None:
        phases = (("prefill", joint.prefill), ("decode", joint.decode))
        texts = [f"{name}:\n{explain(negotiation)}" for name, negotiation in phases]
        raise NoBackendError("\n".join((joint.refusal, *texts)))
    _tell(joint.prefill, "prefill")
    _tell(joint.decode, "decode")
    return choice


def select_for_layers(
    kinds: Mapping[str, AttentionRequest],
    /,
    *,
    host: Host | None = None,
    **fields: Unpack[RequestFields],
) -> LayersChoice:
    """A backend for each kind of layers of one model (full and windowed ones, cross attention, other head sizes, ...),
    such that one batch and one builder serve them all.

    ``kinds`` maps a name to what such layers need; ``fields`` replace those of every request. Of the backends that
    the requests leave open, those that name the device come first, then as few backends as possible, then their order
    for each kind. Kinds have one block size wherever their backends have one in common. Errors as of ``select``;
    those of a request begin with ``kinds['name']``, and NoBackendError names the kinds that no backend serves.
    ValueError where the kinds make no batch: none but cross layers, two kinds of these, or a kind without a cache.
    """
    negotiation = negotiate_installed_layers(kinds, host=host, **fields)
    choice = choose_layers(negotiation)
    if choice is None:
        raise NoBackendError(negotiation.refusal)
    for kind, of_kind in negotiation.by_kind.items():
        _tell(of_kind, f"layers {quoted(kind)}", "cannot be used beside the backends of the other layers")
    return choice


def _tell(
    negotiation: Negotiation, subject: str = "", apart: str = "shares no cache with a backend for the other phase"
) -> None:
    """Logs a choice (INFO; a fallback is a WARNING, and warns too) and the reasons against the others (DEBUG)."""
    chosen, named = negotiation.chosen, negotiation.fell_back_from
    if chosen is not None:
        used = f"using {chosen.label}{f' for {subject}' if subject else ''} on {negotiation.host.device}"
        level = logging.WARNING if named else logging.INFO
        logged(logger, level, "%s because %s", used, _because(negotiation, chosen, apart))
    for candidate in negotiation.rejected:
        in_vain = _excludes_in_vain(candidate, negotiation)
        for reason in candidate.reasons:
            logged(logger, logging.WARNING if in_vain else logging.DEBUG, "%s: %s", candidate.label, reason)
        if in_vain:
            warnings.warn(f"exclude: {candidate.label}: {candidate.reasons[0]}", stacklevel=_level_of_caller())
    if chosen is not None and named:
        why = next((f": {one.reasons[0]}" for one in negotiation.rejected if one.name == named and one.reasons), "")
        warnings.warn(
            f"{used} in place of {named}, which {negotiation.asked_by} names and which "
            f"{_cannot(negotiation, apart)}{why}; choice.explain() has every reason, and policy='strict' makes this "
            "an error",
            FallbackWarning,
            stacklevel=_level_of_caller(),
        )


def _excludes_in_vain(candidate: Candidate, negotiation: Negotiation) -> bool:
    """Whether the request excludes a name that nothing has and that resembles another, which may be used then."""
    if candidate.state != "unknown" or candidate.name not in negotiation.request.exclude:
        return False
    return close_name(candidate.name, candidate.reasons[0].accepted) is not None


def _because(negotiation: Negotiation, chosen: Candidate, apart: str) -> str:
    request = negotiation.request
    if negotiation.fell_back_from:
        return f"{negotiation.fell_back_from}, which {negotiation.asked_by} names, {_cannot(negotiation, apart)}"
    if request.backend:
        return f"{negotiation.asked_by} names it"
    if len(negotiation.usable) == 1:
        return "no other backend can be used"
    if chosen is not negotiation.usable[0]:
        return "it goes best with the backends that are chosen with it"
    if chosen.name in request.prefer:
        return "the request prefers it"
    where = f" on {chosen.match.pattern}" if chosen.match and chosen.match.pattern != "any" else ""
    priority = f"priority {chosen.match.priority}{where}" if chosen.match else "order"
    return f"its {priority} comes first of {counted(len(negotiation.usable), 'usable backend')}"


def _cannot(negotiation: Negotiation, apart: str) -> str:
    usable = any(one.name == negotiation.fell_back_from for one in negotiation.usable)
    return apart if usable else "cannot be used"


def _level_of_caller() -> int:
    """The ``stacklevel``, in the calling function, of the first frame outside attncore."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "attncore":
        level, frame = level + 1, frame.f_back
    return level
