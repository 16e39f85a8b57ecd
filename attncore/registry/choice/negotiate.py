"""Negotiation: which backend serves a request on a host. Pure functions of (request, host, records)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attncore.registry.choice.candidates import Candidate, candidates
from attncore.registry.choice.reasons_against import usable_blocks, usable_layouts
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The candidate chosen (None: none can be), every usable one in order, and every one there is."""

    chosen: Candidate | None
    usable: tuple[Candidate, ...]
    rest: tuple[Candidate, ...]


def negotiate(request: AttentionRequest, host: Host, records: Iterable[PluginRecord]) -> Outcome:
    """Choose: the backend named; then ``prefer``; priority on the device; how closely the device is named; name.

    Where the request names a backend that cannot be used, its policy decides: ``strict`` chooses none, ``fallback``
    goes on.
    """
    found = candidates(request, host, records)
    usable = sorted((one for one in found if one.usable), key=lambda one: rank(one, request))
    rest = sorted((one for one in found if not one.usable), key=lambda one: _ORDER.get(one.state, 2))
    chosen = usable[0] if usable else None
    if request.backend and request.policy == "strict" and chosen and chosen.name != request.backend:
        chosen = None
    return Outcome(chosen, tuple(usable), tuple(rest))


_ORDER = {"loaded": 0, "not_installed": 1, "unknown": 1}


def rank(candidate: Candidate, request: AttentionRequest) -> tuple[bool, int, int, tuple[int, int], str]:
    """What usable candidates are sorted by, the first first."""
    prefer = tuple(request.prefer)
    place = prefer.index(candidate.name) if candidate.name in prefer else len(prefer)
    priority, _, closeness = candidate.match or (0, "", (0, 0))
    return (candidate.name != request.backend, place, -priority, (-closeness[0], -closeness[1]), candidate.name)


@dataclass(frozen=True, slots=True)
class JointOutcome:
    """A pair that shares block size, layout and cache dtype (None: there is none), and both negotiations."""

    pair: tuple[Candidate, Candidate] | None
    prefill: Outcome
    decode: Outcome
    blocks: sizes.Sizes = frozenset()
    layouts: tuple[str, ...] = ()


def negotiate_joint(
    prefill: AttentionRequest, decode: AttentionRequest, host: Host, records: Iterable[PluginRecord]
) -> JointOutcome:
    """Choose a backend for each phase together.

    Of the pairs with a block size and a layout in common, the one whose two places are lowest in sum; then one backend
    for both; then the better place for decode.
    """
    records = tuple(records)
    prefill, decode = replace(prefill, phase="prefill"), replace(decode, phase="decode")
    first, second = negotiate(prefill, host, records), negotiate(decode, host, records)
    best = None
    for i, one in enumerate(_eligible(first, prefill)):
        for j, two in enumerate(_eligible(second, decode)):
            if one.form is None or two.form is None:
                continue
            blocks = sizes.intersection(usable_blocks(one.form, prefill), usable_blocks(two.form, decode))
            theirs = usable_layouts(one.form, prefill)
            layouts = tuple(name for name in usable_layouts(two.form, decode) if name in theirs)
            if (isinstance(blocks, frozenset) and not blocks) or not layouts:
                continue
            key = (i + j, one.name != two.name, j)
            if best is None or key < best[0]:
                best = (key, (one, two), blocks, layouts)
    if best is None:
        return JointOutcome(None, _disjoint(first, second), _disjoint(second, first))
    one, two = best[1]
    return JointOutcome(best[1], replace(first, chosen=one), replace(second, chosen=two), best[2], best[3])


def _eligible(outcome: Outcome, request: AttentionRequest) -> tuple[Candidate, ...]:
    if request.backend and request.policy == "strict":
        return (outcome.chosen,) if outcome.chosen else ()
    return outcome.usable


def _disjoint(outcome: Outcome, other: Outcome) -> Outcome:
    """The same outcome with the reason that no pair is left."""
    names = [one.name for one in other.usable]
    reason = Reason(
        "joint",
        f"no block size and layout in common with a backend for the other phase; there: {', '.join(names) or 'none'}",
        None,
        names,
        "attncore",
        "leave block_size and kv_cache_layout open, or use one backend for both phases",
    )
    rejected = tuple(replace(one, reasons=(*one.reasons, reason)) for one in outcome.usable)
    return Outcome(None, (), (*rejected, *outcome.rest))
