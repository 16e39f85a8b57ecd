"""Negotiation: the candidates for a request on a host in order, and the one chosen. A pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attncore.quoted import quoted
from attncore.registry.choice.candidates import Candidate, candidates
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.request import AttentionRequest
from attncore.show import angled, guarded

_LAST_STATES = {"loaded": 0, "not_installed": 1, "unknown": 1}
"""State of a rejected candidate -> its place behind the one that is named; those whose plugin could not be loaded come
last.
"""


@dataclass(frozen=True, slots=True)
class Negotiation:
    """What was asked, and every candidate: the usable ones in order, then the rejected ones.

    ``chosen`` is None where no backend can be used; ``asked_by`` says who named the request's ``backend``.
    """

    request: AttentionRequest
    host: Host
    chosen: Candidate | None
    usable: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    asked_by: str = "the request"

    @property
    def fell_back_from(self) -> str | None:
        """The backend that was named and cannot be used, where another is chosen in its place; else None."""
        named = self.request.backend
        return named if named and self.chosen is not None and self.chosen.name != named else None

    @guarded
    def __repr__(self) -> str:
        chosen = f"{self.chosen.name} chosen" if self.chosen is not None else "none chosen"
        return angled("Negotiation", (chosen, f"{len(self.usable)} usable", f"{len(self.rejected)} rejected"))

    @property
    def refusal(self) -> str:
        """Why nothing was chosen, in a sentence."""
        request = self.request
        if request.backend and request.policy == "strict":
            who = f"backend: {quoted(request.backend)}, named by {self.asked_by},"
            return f"{who} cannot be used on {self.host.device} (policy strict: no other takes its place)"
        return f"no backend can be used on {self.host.device}"


def negotiate(
    request: AttentionRequest, host: Host, records: Iterable[PluginRecord], asked_by: str = "the request"
) -> Negotiation:
    """Choose: the backend named; then ``prefer``; priority on the device; how closely the device is named; name.

    Where the request names a backend that cannot be used, its policy decides: ``strict`` chooses none, ``fallback``
    takes the next.
    """
    judged = candidates(request, host, records)
    usable = sorted((one for one in judged if one.usable), key=lambda one: _rank(one, request))
    rejected = sorted(
        (one for one in judged if not one.usable),
        key=lambda one: (one.name != request.backend, _LAST_STATES.get(one.state, 2)),
    )
    chosen = usable[0] if usable else None
    if request.backend and request.policy == "strict" and chosen and chosen.name != request.backend:
        chosen = None
    return Negotiation(request, host, chosen, tuple(usable), tuple(rejected), asked_by)


def _rank(candidate: Candidate, request: AttentionRequest) -> tuple[bool, int, int, tuple[int, int], str]:
    """What usable candidates are sorted by; the smallest is the best."""
    prefer = tuple(request.prefer)
    place = prefer.index(candidate.name) if candidate.name in prefer else len(prefer)
    priority, _, closeness = candidate.match or (0, "", (0, 0))
    return (candidate.name != request.backend, place, -priority, (-closeness[0], -closeness[1]), candidate.name)
