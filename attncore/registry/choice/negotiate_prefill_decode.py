"""The joint negotiation: one backend for prefill and one for decode over the same cache. A pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attncore.quoted import listed
from attncore.registry.choice.cache_format import common_block_sizes, common_layouts
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.negotiate import Negotiation, negotiate
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes
from attncore.registry.spec.sizes import Sizes


@dataclass(frozen=True, slots=True)
class JointNegotiation:
    """The negotiations of both phases.

    Where ``shares_cache``, the candidates that they chose accept each of ``block_sizes`` and ``layouts``; elsewhere
    neither chose one.
    """

    prefill: Negotiation
    decode: Negotiation
    block_sizes: Sizes = frozenset()
    layouts: tuple[str, ...] = ()

    @property
    def shares_cache(self) -> bool:
        """Whether a pair of backends shares a block size, a layout and a cache dtype."""
        return bool(self.layouts)

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


def negotiate_joint(
    prefill: AttentionRequest,
    decode: AttentionRequest,
    host: Host,
    records: Iterable[PluginRecord],
    asked_by: str = "the request",
) -> JointNegotiation:
    """Choose a backend for each phase together.

    Of the pairs with a block size and a layout in common, the one whose two places are lowest in sum; then one backend
    for both; then the better place for decode.
    """
    records = tuple(records)
    first = negotiate(replace(prefill, phase="prefill"), host, records, asked_by)
    second = negotiate(replace(decode, phase="decode"), host, records, asked_by)
    best = None
    for i, one in enumerate(eligible(first)):
        for j, two in enumerate(eligible(second)):
            if one.spec is None or two.spec is None:
                continue
            block_sizes = sizes.intersection(
                common_block_sizes(one.spec, first.request), common_block_sizes(two.spec, second.request)
            )
            of_prefill = common_layouts(one.spec, first.request)
            layouts = tuple(name for name in common_layouts(two.spec, second.request) if name in of_prefill)
            if (one.name, one.variant) != (two.name, two.variant):  # the own layout of one says nothing to another
                layouts = tuple(name for name in layouts if name != "own")
            if (isinstance(block_sizes, frozenset) and not block_sizes) or not layouts:
                continue
            key = (i + j, one.name != two.name, j)
            if best is None or key < best[0]:
                best = (key, one, two, block_sizes, layouts)
    if best is None:
        return JointNegotiation(_disjoint(first, second), _disjoint(second, first))
    _, one, two, block_sizes, layouts = best
    return JointNegotiation(replace(first, chosen=one), replace(second, chosen=two), block_sizes, layouts)


def eligible(negotiation: Negotiation) -> tuple[Candidate, ...]:
    """The candidates that a joint choice may take: where a backend is named strictly, that one alone."""
    if negotiation.request.backend and negotiation.request.policy == "strict":
        return (negotiation.chosen,) if negotiation.chosen else ()
    return negotiation.usable


def _disjoint(negotiation: Negotiation, other: Negotiation) -> Negotiation:
    """The same negotiation with its usable candidates rejected, since none shares a cache with one of ``other``."""
    names = [candidate.name for candidate in other.usable]
    reason = Reason(
        "joint",
        f"no block size and layout in common with a backend for the other phase; there: {listed(names)}",
        None,
        names,
        "attncore",
        "leave block_size and kv_cache_layout open, or use one backend for both phases",
    )
    rejected = tuple(replace(one, reasons=(*one.reasons, reason)) for one in negotiation.usable)
    return replace(negotiation, chosen=None, usable=(), rejected=(*rejected, *negotiation.rejected))
