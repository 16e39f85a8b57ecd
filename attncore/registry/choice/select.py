"""``select`` and ``select_joint``: what an engine calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from attncore.errors import NoBackendError
from attncore.registry.choice import explain
from attncore.registry.choice.choice import Choice
from attncore.registry.choice.joint import JointChoice
from attncore.registry.choice.negotiate_installed import Decision, decide, decide_joint
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
    found = decide(request, host=host, **fields)
    _log(found)
    if found.chosen is None:
        raise NoBackendError(f"{found.refusal}\n{explain.text(found.outcome, found.request, found.asked_by)}")
    return found.chosen


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
    found = decide_joint(request, host=host, prefer_prefill=prefer_prefill, prefer_decode=prefer_decode, **fields)
    if found.chosen is None:
        texts = [
            f"{name}:\n{explain.text(outcome, found.request, found.asked_by)}"
            for name, outcome in (("prefill", found.joint.prefill), ("decode", found.joint.decode))
        ]
        raise NoBackendError("\n".join((found.refusal, *texts)))
    _log(found.prefill)
    _log(found.decode)
    return found.chosen


def _log(found: Decision) -> None:
    """The choice once at INFO (a fallback at WARNING), what was rejected at DEBUG."""
    chosen, request = found.outcome.chosen, found.request
    if chosen is not None:
        line = f"attention backend {chosen.label} on {found.host.device}"
        replaces = request.backend is not None and request.backend != chosen.name
        if replaces:
            line += f" in place of {request.backend}, which cannot be used"
        if line not in _told:
            _told.add(line)
            logger.log(logging.WARNING if replaces else logging.INFO, "%s", line)
    if logger.isEnabledFor(logging.DEBUG):
        for candidate in found.outcome.rest:
            for reason in candidate.reasons:
                logger.debug("%s: %s", candidate.label, reason)
