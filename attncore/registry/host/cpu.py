"""The processor's name and flags, from /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path


def cpu_flags(root: Path) -> frozenset[str]:
    """The flags (x86) or features (Arm) of the first processor in /proc/cpuinfo; empty where there is none."""
    return frozenset(_cpuinfo(root, "flags", "Features").split())


def cpu_name(root: Path) -> str:
    """The processor's name; empty where /proc/cpuinfo gives none."""
    return _cpuinfo(root, "model name")


def _cpuinfo(root: Path, *keys: str) -> str:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""
