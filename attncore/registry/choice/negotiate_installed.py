"""A request, this process's plugins and a host brought together: what ``select`` and `attncore explain` stand on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

from attncore import env
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.choice import Choice
from attncore.registry.choice.joint import JointChoice
from attncore.registry.choice.negotiate import JointOutcome, Outcome, negotiate, negotiate_joint
from attncore.registry.choice.reasons_against import pick_block, usable_blocks, usable_layouts
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.request import AttentionRequest

_FIELDS = {one.name: one for one in fields(AttentionRequest)}


@dataclass(frozen=True)
class Decision:
    """A negotiation and what went into it; ``chosen`` is None where no backend can be used."""

    request: AttentionRequest
    asked_by: str
    host: Host
    outcome: Outcome

    @cached_property
    def chosen(self) -> Choice | None:
        """The choice, its block size and layout settled."""
        candidate = self.outcome.chosen
        if candidate is None or candidate.form is None:
            return None
        form, request = candidate.form, self.request
        block = pick_block(usable_blocks(form, request), request, (form.preferred_block_size,))
        return self.choice(candidate, block, usable_layouts(form, request)[0])

    def choice(self, candidate: Candidate, block_size: int, layout: str) -> Choice:
        """A usable candidate as a choice."""
        if candidate.form is None:
            raise ValueError(f"candidate: {candidate.label} is not usable")
        return Choice(
            name=candidate.name,
            spec=candidate.form,
            variant=candidate.variant,
            block_size=block_size,
            kv_cache_layout=layout,
            request=self.request,
            host=self.host,
            candidate=candidate,
            outcome=self.outcome,
            asked_by=self.asked_by,
        )

    @property
    def refusal(self) -> str:
        """Why nothing was chosen, in a sentence."""
        request = self.request
        if request.backend and request.policy == "strict":
            who = f"backend: {request.backend!r}, named by {self.asked_by},"
            return f"{who} cannot be used on {self.host.device} (policy strict)"
        return f"no backend can be used on {self.host.device}"


@dataclass(frozen=True)
class JointDecision:
    """The negotiations of both phases; ``chosen`` is None where no pair shares a cache."""

    prefill: Decision
    decode: Decision
    joint: JointOutcome

    @property
    def request(self) -> AttentionRequest:
        """The request of both, without a phase."""
        return replace(self.decode.request, phase=None)

    @property
    def asked_by(self) -> str:
        """Who named the backend."""
        return self.decode.asked_by

    @property
    def host(self) -> Host:
        """The host of both."""
        return self.decode.host

    @property
    def refusal(self) -> str:
        """Why nothing was chosen, in a sentence."""
        return self.decode.refusal

    @cached_property
    def chosen(self) -> JointChoice | None:
        """The pair, with the block size and the layout that both take."""
        if self.joint.pair is None:
            return None
        first, second = self.joint.pair
        preferred = [one.form.preferred_block_size for one in (second, first) if one.form is not None]
        block = pick_block(self.joint.blocks, self.decode.request, preferred)
        layout = self.joint.layouts[0]
        return JointChoice(self.prefill.choice(first, block, layout), self.decode.choice(second, block, layout))


def decide(request: AttentionRequest | None = None, *, host: Host | None = None, **given: Any) -> Decision:
    """Negotiate for a request, given whole or as fields, on ``host`` (None: this machine). Errors as of ``select``."""
    wanted, asked_by = _request(request, given)
    plugins = registry()
    host = _host(host).with_packages(plugins.packages)
    return Decision(wanted, asked_by, host, negotiate(wanted, host, plugins.records))


def decide_joint(
    request: AttentionRequest | None = None,
    *,
    host: Host | None = None,
    prefer_prefill: Iterable[str] = (),
    prefer_decode: Iterable[str] = (),
    **given: Any,
) -> JointDecision:
    """Negotiate for both phases together. Errors as of ``select_joint``."""
    wanted, asked_by = _request(request, given)
    plugins = registry()
    host = _host(host).with_packages(plugins.packages)
    prefill = replace(wanted, phase="prefill", prefer=_first("prefer_prefill", prefer_prefill, wanted.prefer))
    decode = replace(wanted, phase="decode", prefer=_first("prefer_decode", prefer_decode, wanted.prefer))
    joint = negotiate_joint(prefill, decode, host, plugins.records)
    return JointDecision(
        Decision(prefill, asked_by, host, joint.prefill), Decision(decode, asked_by, host, joint.decode), joint
    )


def _host(host: Host | None) -> Host:
    if host is not None and not isinstance(host, Host):
        raise TypeError(f"host: {host!r} is not a Host; Host.assume('sm_90') makes one")
    return host or Host.probe()


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


def _first(field: str, names: Iterable[str], rest: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"{field}: {names!r} is not a collection of names")
    return tuple(dict.fromkeys((*names, *rest)))
