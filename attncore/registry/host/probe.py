"""The facts of this machine: its NVIDIA or AMD devices, else its CPU.

Needs no torch, and makes no CUDA context in this process: one made before a fork would make CUDA unusable in the child.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from attncore.registry.host import amd, nvidia
from attncore.registry.host.cpu import cpu_flags, cpu_name
from attncore.registry.host.visible_devices import visible_devices

ROOT = Path("/")


class MachineFacts(NamedTuple):
    """What a probe finds; the fields of a Host of the same names."""

    device: str
    device_name: str
    device_count: int
    driver: str
    cpu_flags: frozenset[str]
    notes: tuple[str, ...]


def probe(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> MachineFacts:
    """The machine under ``root``: its NVIDIA devices where any are visible, else its AMD devices, else its CPU.

    Never raises: what cannot be found out is a note.
    """
    notes: list[str] = []
    flags = cpu_flags(root)
    for name, find, variables in (
        ("NVIDIA", nvidia.devices, ("CUDA_VISIBLE_DEVICES",)),
        ("AMD", amd.devices, ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
    ):
        try:
            driver, found = find(root, notes)
        except Exception as error:  # a driver in an unforeseen state must not take the process down
            notes.append(f"{name} devices cannot be probed: {type(error).__name__}: {error}")
            continue
        visible = visible_devices(found, variables, environ)
        if found and not visible:
            notes.append(f"{len(found)} {name} device(s) hidden by {' or '.join(variables)}")
        if visible:
            counts = Counter(accelerator.device for accelerator in visible)
            if len(counts) > 1:
                notes.append(f"devices of several kinds ({', '.join(counts)}); the first is taken")
            first = visible[0]
            return MachineFacts(first.device, first.name, counts[first.device], driver, flags, tuple(notes))
    return MachineFacts("cpu", cpu_name(root), 1, "", flags, tuple(notes))
