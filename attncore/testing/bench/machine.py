"""What a saved run says of its machine: enough to keep runs of other machines apart, nothing that tells whose it is."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path

_FIELDS = {"model name": "cpu", "cpu family": "family", "model": "model"}


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The processor by name, family and model, and the number of its cores."""
    found = {"cpu": "", "family": "", "model": ""}
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:  # no Linux
        lines = []
    for line in lines:
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _FIELDS and value:
            found[_FIELDS[name]] = value
    return {**found, "cpu": found["cpu"] or platform.processor() or platform.machine(), "cores": str(os.cpu_count())}


def machine_name(facts: dict[str, str]) -> str:
    """A name of a machine that a folder may have: ``intel-xeon-processor-2-cores-1a2b3c``."""
    digest = hashlib.sha256("|".join(facts[name] for name in sorted(facts)).encode()).hexdigest()[:6]
    words = re.sub(r"\((r|tm|c)\)|\bcpu\b|@.*", " ", facts["cpu"].lower())
    readable = "-".join(re.findall("[a-z0-9]+", words))[:40].strip("-")
    return f"{readable or 'unknown'}-{facts['cores']}-cores-{digest}"
