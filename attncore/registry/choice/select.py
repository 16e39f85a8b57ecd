"""``select`` and ``select_joint``: what an engine calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from attncore.errors import NoBackendError
from attncore.registry.choice.choice import Choice, choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.negotiate_installed import negotiate_installed, negotiate_installed_joint
from attncore.registry.choice.prefill_decode_choice import JointChoice, choose_joint
from attncore.registry.host.host import Host
from attncore.registry.request import AttentionRequest

logger = logging.getLogger(__name__)
_told: set[str] = set()


def select(request: AttentionRequest | None = None, /, *, host: Host | None = None, **fields: Any) -> Choice:
    """The backend for a request, given whole or as its fields (fields given beside a request replace its own).

    ``host`` is this machine unless another is given. ATTNCORE_BACKEND names the backend where the request names none.
    Raises ValueError or TypeError naming the field for a bad request, and NoBackendError, with every candidate and all
    its reasons, where no backend can be used.
    """
    negotiation = negotiate_installed(request, host=host, **fields)
    _log(negotiation)
    choice = choose(negotiation)
    if choice is None:
        raise NoBackendError(f"{negotiation.refusal}\n{explain(negotiation)}")
    return choice


def select_joint(
    request: AttentionRequest | None = None,
    /,
    *,
    host: Host | None = None,
    prefer_prefill: Iterable[str] = (),
    prefer_decode: Iterable[str] = (),
    **fields: Any,
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
    _log(joint.prefill)
    _log(joint.decode)
    return choice


def _log(negotiation: Negotiation) -> None:
    """Each choice once at INFO (a fallback at WARNING), the reasons against the rejected ones at DEBUG."""
    chosen, request = negotiation.chosen, negotiation.request
    if chosen is not None:
        line = f"attention backend {chosen.label} on {negotiation.host.device}"
        replaces = request.backend is not None and request.backend != chosen.name
        if replaces:
            line += f" in place of {request.backend}, which cannot be used"
        if line not in _told:
            _told.add(line)
            logger.log(logging.WARNING if replaces else logging.INFO, "%s", line)
    if logger.isEnabledFor(logging.DEBUG):
        for candidate in negotiation.rejected:
            for reason in candidate.reasons:
                logger.debug("%s: %s", candidate.label, reason)
