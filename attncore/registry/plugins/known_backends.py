"""Backends that attncore knows by name, installed or not, each with the distribution that provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attncore.how_to_install import install_distribution
from attncore.registry.host.host import Host
from attncore.registry.reasons import Reason


class KnownBackend(NamedTuple):
    """A backend's distribution, its platforms (empty: any), and the hardware that it needs, in words."""

    distribution: str
    platforms: tuple[str, ...]
    hardware: str


KNOWN: Mapping[str, KnownBackend] = {
    "flash": KnownBackend("attn-flash", ("cuda",), "an NVIDIA GPU"),
    "flashinfer": KnownBackend("attn-flashinfer", ("cuda",), "an NVIDIA GPU"),
    "reference": KnownBackend("attncore", (), ""),
    "rocm": KnownBackend("attn-rocm", ("cuda", "rocm"), "a GPU"),
}
"""Name -> the backend. Each name belongs to its distribution: another that claims it is refused."""


def not_installed(name: str, host: Host) -> Reason:
    """The reason of the backend ``name`` where its distribution is not installed."""
    return Reason(
        "not_installed", "not installed", name, KNOWN[name].distribution, "attncore", install_line(name, host)
    )


def install_line(name: str, host: Host) -> str:
    """The command that installs the backend ``name``, with the hardware it needs where ``host`` lacks it."""
    known = KNOWN[name]
    line = install_distribution(known.distribution)
    if known.platforms and host.platform not in known.platforms:
        line += f" (needs {known.hardware}; this host has {'no GPU' if host.platform == 'cpu' else host.arch})"
    return line
