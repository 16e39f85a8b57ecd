"""The negotiation for the kinds of layers of one model, which share a batch and its steps. A pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from attncore.quoted import listed, quoted
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import Negotiation, negotiate
from attncore.registry.choice.negotiate_prefill_decode import eligible
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.vocabulary import PAD_SEQ_LEN


@dataclass(frozen=True, slots=True)
class LayersNegotiation:
    """The negotiation of each kind. Where ``agreed``, what they chose can share a step; elsewhere none chose."""

    by_kind: Mapping[str, Negotiation]
    agreed: bool

    @property
    def refusal(self) -> str:
        """Why nothing was chosen: a line, and the explanation of each kind that stands in the way."""
        alone = {kind: found for kind, found in self.by_kind.items() if found.chosen is None}
        lines = [f"{_layers(kind)}: {found.refusal}\n{explain(found)}" for kind, found in alone.items()]
        return "\n".join(lines)


def is_cross(request: AttentionRequest) -> bool:
    """Whether a kind's layers read an encoder's keys, in the cross group of a batch."""
    return "encoder_decoder" in request.asked_features


def check_kinds(requests: Mapping[str, AttentionRequest]) -> None:
    """ValueError where the kinds make no batch."""
    crosses = [kind for kind, request in requests.items() if is_cross(request)]
    if len(crosses) == len(requests):
        raise ValueError("kinds: none has a decoder's own keys; give one that asks for no encoder_decoder")
    if len(crosses) > 1:
        names = " and ".join(map(quoted, crosses[:2]))
        raise ValueError(f"kinds: {names} both ask for encoder_decoder; a batch has one cross group, so make them one")
    for kind, request in requests.items():
        if "encoder" in request.asked_features and kind not in crosses:
            raise ValueError(
                f"kinds[{quoted(kind)}].features: encoder; such layers keep no cache and are in no group of a batch; "
                "attncore.select chooses for them"
            )


def negotiate_layers(
    requests: Mapping[str, AttentionRequest],
    host: Host,
    records: Iterable[PluginRecord],
    asked_by: Mapping[str, str] | None = None,
) -> LayersNegotiation:
    """Choose a backend for each kind together.

    They agree on ``pad_seq_len``, since the lengths of a step are one array. Of what a kind's request leaves open, a
    backend that names the device comes before one for any device; then as few backends as possible; then the lowest
    sum of their places.
    """
    records = tuple(records)
    found = {
        kind: negotiate(request, host, records, (asked_by or {}).get(kind, "the request"))
        for kind, request in requests.items()
    }
    if any(one.chosen is None for one in found.values()):
        return LayersNegotiation(found, False)
    agreements = [chosen for pad in PAD_SEQ_LEN if (chosen := _fewest(found, pad)) is not None]
    if not agreements:
        return LayersNegotiation({kind: _apart(kind, found) for kind in found}, False)
    best = min(agreements, key=lambda chosen: _cost(chosen, found))
    return LayersNegotiation({kind: replace(one, chosen=best[kind]) for kind, one in found.items()}, True)


def _fewest(found: Mapping[str, Negotiation], pad: int) -> dict[str, Candidate] | None:
    """The candidate of each kind, of those that state ``pad``; None where a kind has none."""
    open_to: dict[str, dict[str, Candidate]] = {}
    for kind, one in found.items():
        with_pad = [each for each in eligible(one) if each.spec is not None and each.spec.pad_seq_len == pad]
        if not with_pad:
            return None
        least = min(_asked(each, one) for each in with_pad)
        open_to[kind] = {each.name: each for each in with_pad if _asked(each, one) == least}
    names = sorted({name for by_name in open_to.values() for name in by_name})
    for count in range(1, len(names) + 1):
        agreements = [
            {kind: next(each for name, each in by_name.items() if name in some) for kind, by_name in open_to.items()}
            for some in map(frozenset, combinations(names, count))
            if all(some & by_name.keys() for by_name in open_to.values())
        ]
        if agreements:
            return min(agreements, key=lambda chosen: _cost(chosen, found))
    return None


def _asked(candidate: Candidate, negotiation: Negotiation) -> tuple[bool, int, bool]:
    """What counts for a kind alone: whether it is not the one named, its place in ``prefer``, whether it is for any
    device."""
    request = negotiation.request
    prefer = tuple(request.prefer)
    place = prefer.index(candidate.name) if candidate.name in prefer else len(prefer)
    for_any = candidate.match is None or candidate.match.pattern == "any"
    return (request.backend is not None and candidate.name != request.backend, place, for_any)


def _cost(chosen: Mapping[str, Candidate], found: Mapping[str, Negotiation]) -> tuple[object, ...]:
    """What agreements are compared by; the smallest is the best."""
    asked = [_asked(chosen[kind], one) for kind, one in found.items()]
    places = [one.usable.index(chosen[kind]) for kind, one in found.items()]
    return (*map(sum, zip(*asked, strict=True)), len({each.name for each in chosen.values()}), sum(places), places)


def _apart(kind: str, found: Mapping[str, Negotiation]) -> Negotiation:
    """The negotiation of a kind with its usable candidates rejected, since none pads as one of another kind does."""
    pads = {
        other: sorted({each.spec.pad_seq_len for each in eligible(one) if each.spec}) for other, one in found.items()
    }
    mine = found[kind]
    others = [f"{_layers(other)}: {listed(pads[other])}" for other in found if other != kind]
    rejected = [replace(one, reasons=(*one.reasons, _reason(one, others, pads))) for one in mine.usable]
    return replace(mine, chosen=None, usable=(), rejected=(*rejected, *mine.rejected))


def _reason(candidate: Candidate, others: list[str], pads: Mapping[str, list[int]]) -> Reason:
    pad = candidate.spec.pad_seq_len if candidate.spec is not None else None
    message = f"its padded rows have seq_lens {pad}, and all layers of a step share them; the others' backends: "
    fix = "leave backend and prefer open, or build the layers' steps by builders of their own"
    return Reason("joint", message + "; ".join(others), pad, dict(pads), "attncore", fix)


def _layers(kind: str) -> str:
    return f"layers {quoted(kind)}"
