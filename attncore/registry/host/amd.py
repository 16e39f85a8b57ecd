"""AMD's devices, from the compute topology of the Linux kernel under /sys."""

from __future__ import annotations

from pathlib import Path

from attncore.registry.host.accelerator import Accelerator


def devices(root: Path, notes: list[str]) -> tuple[str, list[Accelerator]]:
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
            uuid = f"GPU-{int(facts.get('unique_id', 0)):x}"
            found.append(Accelerator(f"rocm:{gfx_name(version)}", _text(node / "name"), uuid))
    if found and not (root / "dev/kfd").exists():
        notes.append("AMD devices are listed but /dev/kfd is not there: ROCm cannot open them")
    return _text(root / "sys/module/amdgpu/version"), found


def gfx_name(version: int) -> str:
    """``gfx90a`` from 90010: two decimal digits for minor, two for stepping, which is written in hex."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
