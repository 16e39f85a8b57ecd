"""A negotiation in words: a line a candidate, the chosen one first; several reasons of one candidate on lines of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator

from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.negotiate import Outcome
from attncore.registry.request import AttentionRequest


def text(outcome: Outcome, request: AttentionRequest, asked_by: str = "the request") -> str:
    """Every candidate of a negotiation with all its reasons. ``asked_by`` says who named the backend."""
    lines: list[str] = []
    if outcome.chosen is not None:
        lines.append(f"{outcome.chosen.label}: chosen; {', '.join(_why(outcome, request, asked_by))}")
        lines.extend(_passed_over(outcome.chosen))
    for candidate in outcome.usable:
        if candidate is not outcome.chosen:
            lines.append(f"{candidate.label}: usable, not chosen; {', '.join(_standing(candidate, request))}")
            lines.extend(_passed_over(candidate))
    for candidate in outcome.rest:
        lines.extend(_rejected(candidate))
    return "\n".join(lines)


def _why(outcome: Outcome, request: AttentionRequest, asked_by: str) -> Iterator[str]:
    chosen = outcome.chosen
    if chosen is None:
        return
    if request.backend == chosen.name:
        yield f"named by {asked_by}"
    elif request.backend:
        yield f"in place of {request.backend}, which {asked_by} names and which cannot be used"
    yield from _standing(chosen, request)


def _standing(candidate: Candidate, request: AttentionRequest) -> Iterator[str]:
    if candidate.name in request.prefer:
        yield "preferred by the request"
    if candidate.match is not None:
        where = "any device" if candidate.match.pattern == "any" else candidate.match.pattern
        yield f"priority {candidate.match.priority} on {where}"
    if candidate.variant:
        yield f"variant {candidate.variant} ({candidate.library})"
    if candidate.form is not None:
        yield from candidate.form.notes
    for warning in candidate.warnings:
        yield warning.message


def _passed_over(candidate: Candidate) -> Iterator[str]:
    """Why not the variants that the backend prefers to the one that fits."""
    for name, reasons in candidate.passed_over:
        yield f"  not its variant {name}: {' | '.join(map(str, reasons))}"


def _rejected(candidate: Candidate) -> Iterator[str]:
    if len(candidate.reasons) == 1:
        yield f"{candidate.label}: {candidate.reasons[0]}"
        return
    yield f"{candidate.label}: {len(candidate.reasons)} reasons"
    for reason in candidate.reasons:
        yield f"  {reason}"
