"""The support table: what of the contract a backend does, by capability, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attncore._version import __version__
from attncore.quoted import json_value
from attncore.show import counted, markdown_cell

STATES = ("failed", "expected failure", "not run", "supported", "unsupported")
"""Of a row, the worst first: some test failed; some failed as its author expects; some waits for the plainest steps to
be right; some passed; none could run. A row whose tests all found nothing to check is left out."""
_OUTCOMES = {"failed": 0, "expected failure": 1, "not run": 2, "passed": 3, "skipped": 4}
_NOTHING = "nothing to check"


class Result(NamedTuple):
    """What came of one test, and why: ``passed``, ``failed``, ``skipped``, ``not run``, ``expected failure`` or
    ``nothing to check``.
    """

    capability: str
    """Its row of the table."""
    test: str
    outcome: str
    reason: str


@dataclass
class Report:
    """The results of one backend."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it is created with."""
    device: str | None = None
    """A torch device where the test file states one."""
    identity: Mapping[str, Any] | None = None
    """What ``identity`` has returned before the tests; None where it was not asked."""
    results: list[Result] = field(default_factory=list)
    use_mla: bool = False
    """Whether its tests ask for latent caches alone."""

    def add(self, result: Result) -> None:
        """A result more."""
        self.results.append(result)

    @property
    def title(self) -> str:
        """The backend, and what else tells its table from another of the same backend."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        latent = " over latent caches" if self.use_mla else ""
        return self.backend + (f" ({given})" if given else "") + latent + (f" on {self.device}" if self.device else "")

    @property
    def failures(self) -> list[Result]:
        """The tests that failed."""
        return [result for result in self.results if result.outcome == "failed"]

    def rows(self) -> list[dict[str, Any]]:
        """A row a capability, in the order of the tests: its state, its numbers of tests, the first reason."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.capability, []).append(result)
        return [
            _row(capability, results)
            for capability, results in found.items()
            if any(result.outcome != _NOTHING for result in results)
        ]

    def as_json(self) -> dict[str, Any]:
        """The table, the failures, and of what they are, as JSON types."""
        return {
            "backend": self.backend,
            "options": json_value(self.options),
            **(identity(self.backend) if self.identity is None else self.identity),
            "attncore": __version__,
            "rows": self.rows(),
            "failures": [{"test": one.test, "reason": one.reason} for one in self.failures],
        }

    def text(self) -> str:
        """The table as Markdown, and a line for each test that failed."""
        failed = [f"FAILED {one.capability}: {one.test}" for one in self.failures]
        return "\n".join([self.markdown(), *failed])

    def why_skipped(self) -> str:
        """Why tests were skipped, and where each says it; empty where none was."""
        count = sum(one.outcome in ("skipped", _NOTHING) for one in self.results)
        if not count:
            return ""
        return (
            f"{counted(count, 'test')} of {self.title} skipped: what its spec does not declare, or this machine has "
            "not; `pytest -rs` says why of each"
        )

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = ["| capability | state | passed | reason |", "|---|---|---|---|"]
        for row in self.rows():
            ran = row["passed"] + row["failed"] + row["expected_failures"]
            count = f"{row['passed']} of {ran}" if ran else "-"
            reason = markdown_cell(" ".join(row["reason"].split())[:200])
            lines.append(f"| {row['capability']} | {row['state']} | {count} | {reason} |")
        return "\n".join(lines)


def _row(capability: str, results: list[Result]) -> dict[str, Any]:
    state = STATES[min(_OUTCOMES[result.outcome] for result in results if result.outcome != _NOTHING)]
    outcomes = [result.outcome for result in results]
    wanted = "skipped" if state == "unsupported" else state
    reasons = [result.reason for result in results if result.outcome == wanted and result.reason]
    return {
        "capability": capability,
        "state": state,
        "passed": outcomes.count("passed"),
        "failed": outcomes.count("failed"),
        "expected_failures": outcomes.count("expected failure"),
        "skipped": outcomes.count("skipped") + outcomes.count(_NOTHING),
        "reason": reasons[0] if reasons else "",
    }


def identity(name: str) -> dict[str, Any]:
    """The distribution of a backend and its version, and the device; a backend may change what is found afterwards."""
    from attncore.registry.host.host import Host
    from attncore.registry.plugins.load import registry

    found = [record for record in registry().records if record.name == name]
    host = Host.probe()
    return {
        "distribution": found[0].distribution if found else "",
        "version": found[0].version if found else "",
        "device": host.device,
        "device_name": host.device_name,
    }
