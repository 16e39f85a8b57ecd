"""A choice in a few lines of text, and its negotiation as an HTML table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attncore.quoted import one_line
from attncore.registry.choice.candidates import Candidate
from attncore.show import angled, cut, html_table, preformatted


def choice_text(choice: Any) -> str:
    """``repr`` of a Choice."""
    found = choice.negotiation
    facts = (
        f"variant {cut(one_line(choice.candidate.variant_label), 48)}" if choice.variant else "",
        f"block_size {choice.block_size}",
        f"kv_cache_layout {choice.kv_cache_layout}",
        f"kv_cache_dtype {choice.kv_cache_dtype}",
        f"IN PLACE OF {choice.fell_back_from}" if choice.fell_back_from else "",
        f"{len(found.usable) - 1} other usable, {len(found.rejected)} not usable (explain() says why)",
    )
    return angled(f"Choice {choice.candidate.label} on {choice.host.device}", facts)


def choice_html(choice: Any) -> str:
    """``_repr_html_`` of a Choice: a row for each candidate."""
    rows = list(_rows(choice.negotiation))
    return preformatted(repr(choice)) + html_table(("backend", "state", "priority", "reasons against it"), rows)


def _rows(negotiation: Any) -> Iterator[tuple[str, ...]]:
    for one in (*negotiation.usable, *negotiation.rejected):
        state = "chosen" if one is negotiation.chosen else "usable" if one.usable else one.state.replace("_", " ")
        state = "not usable" if state == "loaded" else state  # its reasons say why
        yield one.label, state, _priority(one), " | ".join(map(str, one.reasons))


def _priority(candidate: Candidate) -> str:
    return f"{candidate.match.priority} on {candidate.match.pattern}" if candidate.match else ""
