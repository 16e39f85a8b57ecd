"""``select``: the request, this host and the plugins of this process, brought together; everything below it is pure."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from typing import Any

from attncore import env
from attncore.errors import NoBackendError
from attncore.registry import explain
from attncore.registry.candidates import Candidate
from attncore.registry.choice import Choice
from attncore.registry.constraints import pick_block, usable_blocks, usable_layouts
from attncore.registry.host import Host
from attncore.registry.joint import JointChoice
from attncore.registry.load import Registry, registry
from attncore.registry.negotiate import Outcome, negotiate, negotiate_joint
from attncore.registry.request import AttentionRequest

logger = logging.getLogger(__name__)
_told: set[str] = set()
_FIELDS = {one.name: one for one in fields(AttentionRequest)}


def select(request: AttentionRequest | None = None, /, *, host: Host | None = None, **fields: Any) -> Choice:
    """The backend for a request, given whole or as the fields of one (fields given beside a request replace its own).

    ``host`` is this machine unless another is given. ATTNCORE_BACKEND names the backend where the request names none.
    Raises ValueError or TypeError naming the field for a bad request, and NoBackendError, with every candidate and all
    its reasons, where no backend can be used.
    """
    wanted, asked_by = _request(request, fields)
    plugins = registry()
    host = (host or Host.probe()).with_packages(plugins.packages)
    outcome = negotiate(wanted, host, plugins.records)
    _log(outcome, host)
    if outcome.chosen is None:
        raise NoBackendError(f"{_refusal(wanted, host, asked_by)}\n{explain.text(outcome, wanted, asked_by)}")
    return choice(outcome.chosen, outcome, wanted, host, asked_by)


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
    wanted, asked_by = _request(request, fields)
    plugins: Registry = registry()
    host = (host or Host.probe()).with_packages(plugins.packages)
    prefill = replace(wanted, phase="prefill", prefer=_first(prefer_prefill, wanted.prefer))
    decode = replace(wanted, phase="decode", prefer=_first(prefer_decode, wanted.prefer))
    found = negotiate_joint(prefill, decode, host, plugins.records)
    if found.pair is None:
        texts = [
            f"{name}:\n{explain.text(outcome, wanted, asked_by)}"
            for name, outcome in (("prefill", found.prefill), ("decode", found.decode))
        ]
        raise NoBackendError("\n".join((_refusal(wanted, host, asked_by), *texts)))
    first, second = found.pair
    preferred = [one.form.preferred_block_size for one in (second, first) if one.form is not None]
    block, layout = pick_block(found.blocks, wanted, preferred), found.layouts[0]
    return JointChoice(
        choice(first, replace(found.prefill, chosen=first), prefill, host, asked_by, (block, layout)),
        choice(second, replace(found.decode, chosen=second), decode, host, asked_by, (block, layout)),
    )


def choice(
    chosen: Candidate,
    outcome: Outcome,
    request: AttentionRequest,
    host: Host,
    asked_by: str = "the request",
    joint: tuple[int, str] | None = None,
) -> Choice:
    """The choice of a usable candidate: its block size and layout settled (by ``joint`` where two share them)."""
    form = chosen.form
    if form is None:
        raise ValueError(f"chosen: {chosen.label} is not usable")
    block, layout = joint or (
        pick_block(usable_blocks(form, request), request, (form.preferred_block_size,)),
        usable_layouts(form, request)[0],
    )
    return Choice(
        name=chosen.name,
        spec=form,
        variant=chosen.variant,
        block_size=block,
        kv_cache_layout=layout,
        request=request,
        host=host,
        candidate=chosen,
        outcome=outcome,
        asked_by=asked_by,
    )


def _request(request: AttentionRequest | None, given: dict[str, Any]) -> tuple[AttentionRequest, str]:
    """The request, and who named its backend."""
    if request is not None and not isinstance(request, AttentionRequest):
        raise TypeError(f"request: {request!r} is not an AttentionRequest")
    for name in given:
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{name}: a request has no such field{hint}")
    if request is None:
        for name, one in _FIELDS.items():
            if one.default is MISSING and one.default_factory is MISSING and name not in given:
                raise TypeError(f"{name}: a request must state it")
        request = AttentionRequest(**given)
    elif given:
        request = replace(request, **given)
    if request.backend is None and (named := env.backend()) is not None:
        return replace(request, backend=named), "ATTNCORE_BACKEND"
    return request, "the request"


def _first(names: Iterable[str], rest: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"prefer: {names!r} is not a collection of names")
    return tuple(dict.fromkeys((*names, *rest)))


def _refusal(request: AttentionRequest, host: Host, asked_by: str) -> str:
    if request.backend and request.policy == "strict":
        return f"backend: {request.backend!r}, named by {asked_by}, cannot be used on {host.device} (policy strict)"
    return f"no backend can be used on {host.device}"


def _log(outcome: Outcome, host: Host) -> None:
    if outcome.chosen is not None:
        line = f"attention backend {outcome.chosen.label} on {host.device}"
        if line not in _told:
            _told.add(line)
            logger.info(line)
    if logger.isEnabledFor(logging.DEBUG):
        for candidate in outcome.rest:
            for reason in candidate.reasons:
                logger.debug("%s: %s", candidate.label, reason)
