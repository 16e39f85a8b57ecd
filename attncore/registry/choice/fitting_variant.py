"""Which variant of a spec fits a request on a host, with the reasons against those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attncore.quoted import listed
from attncore.registry import package_requirements
from attncore.registry.choice.reasons_against import reasons_against
from attncore.registry.device_patterns import best_match, without_contained
from attncore.registry.host.host import Host
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.backend_spec import BackendSpec


def variant_label(variant: str, stated: BackendSpec, host: Host) -> str:
    """A variant as every text names it, with its library: the last that it requires, and the version installed.

    ``fa4 (flash-attn-4 4.0.0)``; the name alone where it requires nothing.
    """
    if not variant or not stated.requires:
        return variant
    library = package_requirements.parse(tuple(stated.requires)[-1]).name
    return f"{variant} ({' '.join(filter(None, (library, host.packages.get(library))))})"


def stated_by(variant: str, stated: BackendSpec, plugin: str, host: Host) -> str:
    """Who states the facts of a variant, in a reason: ``variant fa4 (flash-attn-4)``; the plugin where it has none."""
    return f"variant {variant_label(variant, stated, host)}" if variant else plugin


_Judged = list[tuple[str, BackendSpec, list[Reason]]]
"""Variant, the spec as it states it, and the reasons against it."""


def fitting_variant(
    spec: BackendSpec, plugin: str, request: AttentionRequest, host: Host
) -> tuple[str, BackendSpec, tuple[Reason, ...], tuple[tuple[str, tuple[Reason, ...]], ...]]:
    """The first variant that fits, with those before it and their reasons; else the first, with the reasons of all.

    Variants for the other kind of cache, latent or not, are left out where there are some for the one that is asked.
    """
    judged: _Judged = []
    alike = [one for one in spec.by_variant if (one[1].use_mla if request.use_mla else not one[1].mla_only)]
    for variant, stated in alike or spec.by_variant:
        reasons = reasons_against(stated, request, host, stated_by(variant, stated, plugin, host), plugin)
        if not reasons:
            return variant, stated, (), tuple((name, tuple(why)) for name, _, why in judged)
        judged.append((variant, stated, reasons))
    variant, stated, _ = judged[0]
    return variant, stated, tuple(_each_once(judged, plugin, host)), ()


def _each_once(judged: _Judged, plugin: str, host: Host) -> Iterator[Reason]:
    """The reasons of all variants. One that all give names the plugin, any other the variants that give it; those that
    are for other devices share one, and what they alone lack is no matter here. Where a variant needs nothing but a
    distribution, installing that is the others' fix.
    """
    own = {variant: stated_by(variant, stated, plugin, host) for variant, stated, _ in judged}
    install, spared = _install_instead(judged, host)
    alike: dict[tuple[str, str, str], list[tuple[str, Reason]]] = {}
    elsewhere = {variant: one.devices for variant, one, _ in judged if best_match(one.devices, host.device) is None}
    devices = without_contained({device for named in elsewhere.values() for device in named})
    for variant, _, reasons in judged:
        for reason in () if variant in spared else reasons:
            if variant in elsewhere and reason.code == "device":
                message = f"device {host.device} not supported by {own[variant]}; supported: {listed(devices)}"
                reason = replace(reason, message=message, accepted=devices)
            plain = reason.message.removeprefix(f"variant {variant}: ")
            of_plugin = plain.replace(own[variant], plugin)
            given = alike.setdefault((reason.code, of_plugin, reason.fix), [])
            given.append((variant, replace(reason, message=plain)))
    for (code, of_plugin, fix), given in alike.items():
        reason, variants = given[0][1], list(dict.fromkeys(variant for variant, _ in given))
        who, message = plugin, of_plugin
        if len(variants) < len(judged):
            if code != "device" and elsewhere.keys() >= {*variants}:
                continue
            plural = "variants" if len(variants) > 1 else "variant"
            who = f"{plural} {listed(own[variant].removeprefix('variant ') for variant in variants)}"
            named = own[variants[0]] in reason.message
            message = reason.message.replace(own[variants[0]], who)
            message = message if named else f"{plural} {listed(variants)}: {message}"
        source = who if reason.source == own[variants[0]] else reason.source
        if install and code != "requirement":
            fix = install
        yield replace(reason, message=message, source=source, fix=fix)


def _install_instead(judged: _Judged, host: Host) -> tuple[str, set[str]]:
    """What to install for a variant that lacks nothing else, and the variants that then need no other reason; nothing
    where every variant lacks a distribution, or none does.
    """
    missing = [variant for variant, _, reasons in judged if all(reason.code == "requirement" for reason in reasons)]
    if not missing or all(any(reason.code == "requirement" for reason in reasons) for _, _, reasons in judged):
        return "", set()
    lacking = [
        (one, [str(reason.asked) for reason in reasons]) for variant, one, reasons in judged if variant in missing
    ]
    # The first that pip finds by its name, if there is one.
    wanted = min(lacking, key=lambda each: any(_name(text) in each[0].install for text in each[1]))[1]
    names = [_name(text) for text in wanted]
    fresh = all(not host.packages.get(name) for name in names)
    return f"install {listed(dict.fromkeys(names if fresh else wanted))}", set(missing)


def _name(requirement: str) -> str:
    return package_requirements.parse(requirement).name
