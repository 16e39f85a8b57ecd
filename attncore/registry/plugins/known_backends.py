"""Backends that attncore knows of although they may not be installed, each with the distribution that provides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncore.registry.host.host import Host


@dataclass(frozen=True, slots=True)
class Known:
    """A backend's distribution, and the platform it is for (empty: any)."""

    distribution: str
    platform: str
    hardware: str


KNOWN: Mapping[str, Known] = {
    "flash": Known("attn-flash", "cuda", "an NVIDIA GPU"),
    "flashinfer": Known("attn-flashinfer", "cuda", "an NVIDIA GPU"),
    "reference": Known("attncore", "", ""),
    "rocm": Known("attn-rocm", "rocm", "an AMD GPU"),
}
"""Name -> who provides it. These names belong to these distributions: another one that claims such a name is refused.
"""


def install_line(name: str, host: Host) -> str:
    """What to do to have the backend ``name``, and whether it would be of use on ``host``."""
    known = KNOWN[name]
    line = f"pip install {known.distribution}"
    if known.platform and known.platform != host.platform:
        line += f" (needs {known.hardware}; this host has {'no GPU' if host.platform == 'cpu' else host.arch})"
    return line
