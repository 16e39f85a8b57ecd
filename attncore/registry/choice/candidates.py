"""Candidates: every backend that is installed, known or named, with all reasons against it for a request on a host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from attncore.did_you_mean import close_name
from attncore.quoted import listed
from attncore.registry.choice.fitting_variant import fitting_variant, variant_label
from attncore.registry.device_patterns import Match, best_match
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, not_installed
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.backend_spec import BackendSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend, judged for one request on one host.

    ``state`` is of STATES, or ``not_installed`` or ``unknown``. ``spec`` is as the variant that fits states it (the
    first one where none fits); ``match`` is the entry of its devices that describes the host. Neither ``warnings`` nor
    ``passed_over`` count against it: the latter are the variants that the spec prefers to the one that fits, each with
    its reasons.
    """

    name: str
    distribution: str
    version: str
    state: str
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()
    spec: BackendSpec | None = None
    variant: str = ""
    variant_label: str = ""
    """The variant as texts name it, with its library: ``fa4 (flash-attn-4 4.0.0)``."""
    match: Match | None = None
    passed_over: tuple[tuple[str, tuple[Reason, ...]], ...] = ()

    @property
    def usable(self) -> bool:
        """Whether there is no reason against it."""
        return self.spec is not None and not self.reasons

    @property
    def label(self) -> str:
        """``flash (attn-flash 0.1.0)``; only the name where no distribution provides it."""
        source = " ".join(part for part in (self.distribution, self.version) if part)
        return f"{self.name} ({source})" if source and self.state not in ("not_installed", "unknown") else self.name

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "state": self.state,
            "usable": self.usable,
            "variant": self.variant,
            "variant_label": self.variant_label,
            "priority": self.match.priority if self.match else None,
            "priority_on": self.match.pattern if self.match else None,
            "reasons": [reason.as_json() for reason in (*self.reasons, *self.warnings)],
            "passed_over": [
                {"variant": name, "reasons": [reason.as_json() for reason in reasons]}
                for name, reasons in self.passed_over
            ],
        }


def candidates(request: AttentionRequest, host: Host, records: Iterable[PluginRecord]) -> list[Candidate]:
    """The backends of ``records``, those that are known but not installed, and those that the request names in vain."""
    found = [_of_record(record, request, host) for record in records]
    names = {candidate.name for candidate in found}
    for name, known in KNOWN.items():
        if name not in names:
            found.append(Candidate(name, known.distribution, "", "not_installed", (not_installed(name, host),)))
    names.update(KNOWN)
    wanted = (*((request.backend,) if request.backend else ()), *request.prefer)
    for name in dict.fromkeys((*wanted, *sorted(request.exclude))):
        if name not in names:
            found.append(_unknown(name, sorted(names), name in wanted))
    return found


def _unknown(name: str, names: list[str], is_wanted: bool) -> Candidate:
    message = f"no distribution installed here provides a backend of this name; known: {listed(names)}"
    close = close_name(name, names)
    other = "install what provides it" if is_wanted else "leave it out of exclude"
    fix = f"correct the name{f' (did you mean {close}?)' if close else ''}, or {other}"
    return Candidate(name, "", "", "unknown", (Reason("unknown", message, name, names, "attncore", fix),))


def _of_record(record: PluginRecord, request: AttentionRequest, host: Host) -> Candidate:
    plain = Candidate(record.name, record.distribution, record.version, record.state)
    if record.spec is None:
        return replace(plain, reasons=record.reasons)
    variant, spec, reasons, passed_over = fitting_variant(record.spec, record.label, request, host)
    if record.name in request.exclude:
        fix = f"take {record.name} out of exclude"
        reasons = (*reasons, Reason("excluded", "excluded by the request", record.name, None, "the request", fix))
    return replace(
        plain,
        reasons=reasons,
        warnings=record.reasons,
        spec=spec,
        variant=variant,
        variant_label=variant_label(variant, spec, host),
        match=best_match(spec.devices, host.device),
        passed_over=passed_over,
    )
