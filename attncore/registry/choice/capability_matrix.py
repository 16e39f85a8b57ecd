"""The capability matrix: which hardware each backend is for, and what each of its variants can do, as Markdown.

It is made from specs alone and from no library: two machines with the same plugins write the same page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from attncore.quoted import one_line
from attncore.registry.choice.reasons_against import reasons_against
from attncore.registry.choice.runs_here import plain_request
from attncore.registry.device_patterns import best_match, canonical, in_order
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.facts import feature_states, plain_facts
from attncore.show import markdown_cell

DEVICES = (
    "cpu", "cuda:sm_75", "cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120",
    "rocm:gfx1100", "rocm:gfx1151", "rocm:gfx1201",
)  # fmt: skip
"""Rows of hardware that the page always has; the devices that a spec names are added."""

FACTS = (
    "dtypes", "kv_cache_dtypes", "kv_cache_layouts", "head_sizes", "head_size_v", "block_sizes", "preferred_block_size",
    "use_mla", "phases", "cuda_graph", "host_lengths", "max_group_size", "max_model_len", "compiles_at_run_time",
    "finite_tail",
)  # fmt: skip
"""Rows of sizes and words."""


class Column(NamedTuple):
    """One variant of one backend."""

    backend: str
    variant: str
    label: str
    """The distribution and its version."""
    spec: BackendSpec

    @property
    def title(self) -> str:
        """``flash fa4``; the name alone where the backend has no variants."""
        return f"{self.backend} {self.variant}".strip()


def columns(records: Iterable[PluginRecord]) -> list[Column]:
    """A column for each variant of each plugin that is loaded."""
    return [
        Column(record.name, variant, record.label, stated)
        for record in records
        if record.spec is not None
        for variant, stated in record.spec.by_variant
    ]


def markdown(records: Sequence[PluginRecord]) -> str:
    """The page: hardware, features, sizes and words, and why a feature is missing."""
    found = columns(records)
    titles = [_cell(column.title) for column in found]
    tables = {
        "Backends": _table(("backend", "from"), [(_cell(column.title), _cell(column.label)) for column in found]),
        "Hardware": _table(
            ("device", *titles),
            [(_cell(device), *(_priority(one, device) for one in found)) for device in _devices(found)],
        ),
        "Features": _table(("feature", *titles), _features(found)),
        "Sizes and words": _table(("", *titles), [(name, *(_fact(one, name) for one in found)) for name in FACTS]),
        "Why not": _table(("backend", "feature", "why not"), _why(found)),
    }
    return "\n".join(
        line for name, rows in tables.items() for line in (f"## {name}", "", *_LEADS.get(name, ()), *rows, "")
    )


_LEADS = {
    "Hardware": (
        "The priority of each backend there, of which the highest comes first; `-`: it is not for the device.",
        "",
    ),
    "Features": ("`yes`; `no`, and the last table says why; `?` where the spec says nothing, which counts as no.", ""),
}
"""What stands above a table."""


def _devices(found: Iterable[Column]) -> list[str]:
    """DEVICES and those that the specs name, without a ``+``."""
    named = dict.fromkeys(DEVICES)
    for column in found:
        for pattern in column.spec.devices:
            if ":" in pattern and not pattern.endswith("*"):
                named[canonical(pattern.rstrip("+"))] = None
    return in_order(named)


def _priority(column: Column, device: str) -> str:
    """Where nothing but what is installed can speak against it: what a machine lacks is not the page's matter."""
    match = best_match(column.spec.devices, device)
    if match is None:
        return "-"
    reasons = reasons_against(column.spec, plain_request(column.spec), Host.assume(device), column.title, column.label)
    return "-" if any(reason.code == "device" for reason in reasons) else str(match.priority)


def _features(found: Sequence[Column]) -> list[tuple[str, ...]]:
    states = [feature_states(column.spec) for column in found]
    return [
        (f"`{name}`", *("?" if one[name][0] == "not declared" else one[name][0] for one in states))
        for name in (states[0] if states else ())
    ]


def _fact(column: Column, name: str) -> str:
    return _cell(plain_facts(column.spec).get(name, "-").partition(": ")[0])


def _why(found: Iterable[Column]) -> Iterator[tuple[str, str, str]]:
    """The variants of a backend that give one reason share a row."""
    titles: dict[tuple[str, str, str], list[str]] = {}
    for column in found:
        for name, (state, why) in feature_states(column.spec).items():
            if state == "no":
                titles.setdefault((column.backend, name, _cell(why)), []).append(_cell(column.title))
    for (_, name, why), of in titles.items():
        yield ", ".join(of), f"`{name}`", why


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cell(text: str) -> str:
    """Text of a spec or a distribution: no Markdown of its own."""
    return markdown_cell(one_line(text))
