"""Finding out what this machine has: the NVIDIA driver's libraries and /proc, AMD's /sys topology, the CPU's flags.

No torch, and no CUDA context in this process: one made before a fork would make CUDA unusable in the child.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from attncore.registry.host import nvidia
from attncore.registry.host.accelerator import Device
from attncore.registry.host.host import Host

ROOT = Path("/")


def probe(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Host:
    """The machine under ``root``: its NVIDIA devices where there are any that can be seen, else AMD's, else its CPU.

    Never raises: what cannot be found out is a note of the host.
    """
    notes: list[str] = []
    flags = cpu_flags(root)
    for name, find, variables in (
        ("NVIDIA", nvidia.devices, ("CUDA_VISIBLE_DEVICES",)),
        ("AMD", amd_devices, ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
    ):
        try:
            driver, found = find(root, notes)
        except Exception as error:  # a driver in a state that nobody foresaw must not take the process down
            notes.append(f"{name} devices cannot be probed: {type(error).__name__}: {error}")
            continue
        seen = visible(found, variables, environ)
        if found and not seen:
            notes.append(f"{len(found)} {name} device(s) hidden by {' or '.join(variables)}")
        if seen:
            kinds = Counter(device.device for device in seen)
            if len(kinds) > 1:
                notes.append(f"devices of several kinds ({', '.join(kinds)}); the first is taken")
            first = seen[0]
            return Host(
                device=first.device,
                device_name=first.name,
                device_count=kinds[first.device],
                driver=driver,
                cpu_flags=flags,
                notes=tuple(notes),
            )
    return Host(device="cpu", device_name=cpu_name(root), cpu_flags=flags, notes=tuple(notes))


def visible(devices: Sequence[Device], variables: Sequence[str], environ: Mapping[str, str]) -> list[Device]:
    """The devices that are left by variables such as CUDA_VISIBLE_DEVICES, in their order.

    An entry is an index or the beginning of a UUID; as in CUDA, everything after an entry that names no device is
    ignored.
    """
    left = list(devices)
    for variable in variables:
        entries = environ.get(variable)
        if entries is None:
            continue
        chosen: list[Device] = []
        for entry in (part.strip() for part in entries.split(",")):
            if entry.isdecimal() and int(entry) < len(left):
                chosen.append(left[int(entry)])
            elif entry.startswith("MIG-") and left:  # a slice of some device: its architecture is that of the whole
                chosen.append(left[0])
            elif entry and (named := [device for device in left if device.uuid and device.uuid.startswith(entry)]):
                chosen.append(named[0])
            else:
                break
        left = chosen
    return left


def amd_devices(root: Path, notes: list[str]) -> tuple[str, list[Device]]:
    """The amdgpu driver's version, and the GPUs that the kernel's compute topology lists."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found = []
    for node in sorted(nodes.iterdir(), key=lambda path: int(path.name)) if nodes.is_dir() else ():
        try:
            lines = (node / "properties").read_text().splitlines()
        except OSError:  # a device that a container may not see: its properties cannot be read
            continue
        facts = dict(line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)
        version = int(facts.get("gfx_target_version", "0"))
        if version:
            found.append(
                Device(f"rocm:{gfx_name(version)}", _text(node / "name"), f"GPU-{int(facts.get('unique_id', 0)):x}")
            )
    if found and not (root / "dev/kfd").exists():
        notes.append("AMD devices are listed but /dev/kfd is not there: ROCm cannot open them")
    return _text(root / "sys/module/amdgpu/version"), found


def gfx_name(version: int) -> str:
    """``gfx90a`` from 90010: two decimal digits for minor, two for stepping, which is written in hex."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """The flags (x86) or features (Arm) of the first processor in /proc/cpuinfo; empty where there is none."""
    return frozenset(_cpuinfo(root, "flags", "Features").split())


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name; empty where /proc/cpuinfo gives none."""
    return _cpuinfo(root, "model name")


def _cpuinfo(root: Path, *keys: str) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
