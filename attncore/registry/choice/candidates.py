"""Candidates: every backend that is installed, known or named, with all reasons against it for a request on a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from attncore.did_you_mean import close_name
from attncore.quoted import listed
from attncore.registry import package_requirements
from attncore.registry.choice.reasons_against import reasons_against
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
    library: str = ""
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
    asked = (*((request.backend,) if request.backend else ()), *request.prefer, *sorted(request.exclude))
    found.extend(_unknown(name, sorted(names)) for name in dict.fromkeys(asked) if name not in names)
    return found


def _unknown(name: str, names: list[str]) -> Candidate:
    message = f"no distribution installed here provides a backend of this name; known: {listed(names)}"
    close = close_name(name, names)
    fix = f"correct the name{f' (did you mean {close}?)' if close else ''}, or install what provides it"
    return Candidate(name, "", "", "unknown", (Reason("unknown", message, name, names, "attncore", fix),))


def _of_record(record: PluginRecord, request: AttentionRequest, host: Host) -> Candidate:
    plain = Candidate(record.name, record.distribution, record.version, record.state)
    if record.spec is None:
        return replace(plain, reasons=record.reasons)
    variant, spec, reasons, passed_over = _fitting_variant(record.spec, record.label, request, host)
    if record.name in request.exclude:
        fix = f"take {record.name} out of exclude"
        reasons = (*reasons, Reason("excluded", "excluded by the request", record.name, None, "the request", fix))
    return replace(
        plain,
        reasons=reasons,
        warnings=record.reasons,
        spec=spec,
        variant=variant,
        library=_library(spec, host) if variant else "",
        match=best_match(spec.devices, host.device),
        passed_over=passed_over,
    )


def _fitting_variant(
    spec: BackendSpec, plugin: str, request: AttentionRequest, host: Host
) -> tuple[str, BackendSpec, tuple[Reason, ...], tuple[tuple[str, tuple[Reason, ...]], ...]]:
    """The first variant that fits, with those before it and their reasons; else the first, with the reasons of all."""
    judged: list[tuple[str, BackendSpec, list[Reason]]] = []
    for variant, stated in spec.by_variant:
        source = _library(stated, host) if variant else plugin
        reasons = reasons_against(stated, request, host, source, plugin)
        if not reasons:
            return variant, stated, (), tuple((name, tuple(why)) for name, _, why in judged)
        judged.append((variant, stated, reasons))
    variant, stated, _ = judged[0]
    return variant, stated, tuple(_merged(_naming_variants(judged, host), host)), ()


def _library(spec: BackendSpec, host: Host) -> str:
    """The library of a variant, as the reasons name it: its last requirement, with the installed version."""
    if not spec.requires:
        return spec.name
    name = package_requirements.parse(tuple(spec.requires)[-1]).name
    return f"{name} {host.packages.get(name, '')}".strip()


def _naming_variants(judged: list[tuple[str, BackendSpec, list[Reason]]], host: Host) -> list[list[Reason]]:
    """The reasons of each variant. Of several variants of one library the library's name does not tell them apart: a
    reason that only some of these have names its variant."""
    told = {variant: {(reason.code, reason.message) for reason in reasons} for variant, _, reasons in judged}
    named = []
    for variant, stated, reasons in judged:
        others = [
            name for name, other, _ in judged if name != variant and _library(other, host) == _library(stated, host)
        ]
        named.append([
            reason if all((reason.code, reason.message) in told[name] for name in others)
            else replace(reason, message=f"variant {variant}: {reason.message.removeprefix(f'variant {variant}: ')}")
            for reason in reasons
        ])  # fmt: skip
    return named


def _merged(by_variant: list[list[Reason]], host: Host) -> Iterator[Reason]:
    """The reasons of all variants. Where one needs nothing but a distribution, installing that is the others' fix."""
    missing = [reasons for reasons in by_variant if all(reason.code == "requirement" for reason in reasons)]
    installed = [reasons for reasons in by_variant if not any(reason.code == "requirement" for reason in reasons)]
    install = ""
    if missing and installed:
        names = [package_requirements.parse(str(reason.asked)).name for reason in missing[0]]
        fresh = all(not host.packages.get(name) for name in names)
        install = f"install {listed(names if fresh else [reason.asked for reason in missing[0]])}"
        by_variant = [reasons for reasons in by_variant if reasons not in missing]
    seen = set()
    for reasons in by_variant:
        for reason in reasons:
            if (reason.code, reason.message) in seen:
                continue
            seen.add((reason.code, reason.message))
            yield replace(reason, fix=install) if install and reason.code != "requirement" else reason
