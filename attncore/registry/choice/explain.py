"""A negotiation in words: a line per candidate; each of several reasons has its own line.

What the reader asks first is answered first: the chosen one, or why the one that is named cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator

from attncore.quoted import listed
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.request import AttentionRequest


def explain(negotiation: Negotiation) -> str:
    """Every candidate of a negotiation, with what was chosen and why, and all reasons against the others."""
    chosen, request = negotiation.chosen, negotiation.request
    lines: list[str] = []
    if chosen is not None:
        lines.append(f"{chosen.label}: chosen; {', '.join(_why(chosen, negotiation))}")
        lines.extend(_notes(chosen))
        lines.extend(_passed_over(chosen))
    rejected = list(negotiation.rejected)  # the one that is named comes first
    if chosen is None and rejected and rejected[0].name == request.backend:
        lines.extend(_rejected(rejected.pop(0)))
    for candidate in negotiation.usable:
        if candidate is not chosen:
            lines.append(f"{candidate.label}: usable, not chosen; {', '.join(_standing(candidate, request))}")
            lines.extend(_notes(candidate))
            lines.extend(_passed_over(candidate))
    for candidate in rejected:
        lines.extend(_rejected(candidate))
    return "\n".join(lines)


def _why(chosen: Candidate, negotiation: Negotiation) -> Iterator[str]:
    request, asked_by = negotiation.request, negotiation.asked_by
    if request.backend == chosen.name:
        yield f"named by {asked_by}"
    elif negotiation.fell_back_from:
        yield f"in place of {request.backend}, which {asked_by} names and which cannot be used"
    yield from _standing(chosen, request)


def _standing(candidate: Candidate, request: AttentionRequest) -> Iterator[str]:
    """What a usable candidate is ranked by."""
    if candidate.name in request.prefer:
        yield "preferred by the request"
    if candidate.match is not None:
        where = "any device" if candidate.match.pattern == "any" else candidate.match.pattern
        yield f"priority {candidate.match.priority} on {where}"
    if candidate.variant:
        yield f"variant {candidate.variant_label}"


def _notes(candidate: Candidate) -> Iterator[str]:
    """The notes of a candidate's spec and its plugin's warnings, each on a line of its own."""
    notes = candidate.spec.notes if candidate.spec is not None else ()
    yield from (f"  {note}" for note in (*notes, *(warning.message for warning in candidate.warnings)))


def _passed_over(candidate: Candidate) -> Iterator[str]:
    """The reasons against the variants that the backend prefers to the one that fits; several that are for other
    devices share a line.
    """
    elsewhere = [name for name, reasons in candidate.passed_over if {reason.code for reason in reasons} == {"device"}]
    if len(elsewhere) > 1:
        yield f"  not its variants {listed(elsewhere)}: they are for other devices"
    for name, reasons in candidate.passed_over:
        if len(elsewhere) > 1 and name in elsewhere:
            continue
        said = [str(reason).removeprefix(f"variant {name}: ") for reason in reasons]
        yield from _with_reasons(f"  not its variant {name}", said)


def _rejected(candidate: Candidate) -> Iterator[str]:
    yield from _with_reasons(candidate.label, list(map(str, candidate.reasons)))


def _with_reasons(subject: str, reasons: list[str]) -> Iterator[str]:
    """One reason beside its subject; each of several on a line of its own below."""
    if len(reasons) == 1:
        yield f"{subject}: {reasons[0]}"
        return
    indent = " " * (len(subject) - len(subject.lstrip()) + 2)
    yield f"{subject}: {len(reasons)} reasons"
    yield from (f"{indent}{reason}" for reason in reasons)
