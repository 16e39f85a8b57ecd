"""A candidate: one row of a negotiation, with the form of its spec that was judged and all its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from attncore.registry import requirements
from attncore.registry.choice.reasons_against import judge
from attncore.registry.devices import Match, best_match
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, install_line
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason, listed
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.backend_spec import BackendSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as one request on one host sees it.

    ``state`` is of STATES, or ``not_installed`` or ``unknown``. ``form`` is the spec as the variant that fits states it
    (the first one's where none fits); ``match`` the entry of its devices that describes the host. ``warnings`` do not
    count against it, nor does ``passed_over``: the variants that the spec prefers to the one that fits, each with its
    reasons.
    """

    name: str
    distribution: str
    version: str
    state: str
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()
    form: BackendSpec | None = None
    variant: str = ""
    library: str = ""
    match: Match | None = None
    passed_over: tuple[tuple[str, tuple[Reason, ...]], ...] = ()

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against it."""
        return self.form is not None and not self.reasons

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
    """Every backend there is word of: those of ``records``, those known but not installed, those named but unknown."""
    found = [_of_record(record, request, host) for record in records]
    names = {candidate.name for candidate in found}
    for name, known in KNOWN.items():
        if name not in names:
            reason = Reason(
                "not_installed", "not installed", name, known.distribution, "attncore", install_line(name, host)
            )
            found.append(Candidate(name, known.distribution, "", "not_installed", (reason,)))
    names.update(KNOWN)
    asked = (*((request.backend,) if request.backend else ()), *request.prefer)
    found.extend(_unknown(name, sorted(names)) for name in dict.fromkeys(asked) if name not in names)
    return found


def _unknown(name: str, names: list[str]) -> Candidate:
    message = f"no distribution installed here provides a backend of this name; known: {listed(names)}"
    fix = "correct the name, or install what provides it"
    return Candidate(name, "", "", "unknown", (Reason("unknown", message, name, names, "attncore", fix),))


def _of_record(record: PluginRecord, request: AttentionRequest, host: Host) -> Candidate:
    plain = Candidate(record.name, record.distribution, record.version, record.state)
    if record.spec is None:
        return replace(plain, reasons=record.reasons)
    variant, form, reasons, passed_over = _fitting_form(record.spec, record.label, request, host)
    if record.name in request.exclude:
        fix = f"take {record.name} out of exclude"
        reasons = (*reasons, Reason("excluded", "excluded by the request", record.name, None, "the request", fix))
    return replace(
        plain,
        reasons=reasons,
        warnings=record.reasons,
        form=form,
        variant=variant,
        library=_library(form, host) if variant else "",
        match=best_match(form.devices, host.device),
        passed_over=passed_over,
    )


def _fitting_form(
    spec: BackendSpec, plugin: str, request: AttentionRequest, host: Host
) -> tuple[str, BackendSpec, tuple[Reason, ...], tuple[tuple[str, tuple[Reason, ...]], ...]]:
    """The first form that fits, and those before it with their reasons; or the first one with the reasons of all."""
    judged: list[tuple[str, BackendSpec, list[Reason]]] = []
    for variant, form in spec.by_variant:
        source = _library(form, host) if variant else plugin
        reasons = judge(form, request, host, source, plugin)
        if not reasons:
            return variant, form, (), tuple((name, tuple(why)) for name, _, why in judged)
        judged.append((variant, form, reasons))
    variant, form, _ = judged[0]
    return variant, form, tuple(_merged([(form, reasons) for _, form, reasons in judged], host)), ()


def _library(form: BackendSpec, host: Host) -> str:
    """The library of a variant, as the reasons call it: its last requirement, with the version that is there."""
    if not form.requires:
        return form.name
    name = requirements.parse(tuple(form.requires)[-1]).name
    return f"{name} {host.packages.get(name, '')}".strip()


def _merged(judged: list[tuple[BackendSpec, list[Reason]]], host: Host) -> Iterator[Reason]:
    """The reasons of all forms. Where one lacks nothing but a distribution, that is what fixes the others' reasons."""
    missing = [reasons for _, reasons in judged if all(reason.code == "requirement" for reason in reasons)]
    installed = [reasons for _, reasons in judged if not any(reason.code == "requirement" for reason in reasons)]
    install = ""
    if missing and installed:
        names = [requirements.parse(str(reason.asked)).name for reason in missing[0]]
        fresh = all(not host.packages.get(name) for name in names)
        install = f"install {listed(names if fresh else [reason.asked for reason in missing[0]])}"
        judged = [(form, reasons) for form, reasons in judged if reasons not in missing]
    seen = set()
    for _, reasons in judged:
        for reason in reasons:
            if (reason.code, reason.message) in seen:
                continue
            seen.add((reason.code, reason.message))
            yield replace(reason, fix=install) if install and reason.code != "requirement" else reason
