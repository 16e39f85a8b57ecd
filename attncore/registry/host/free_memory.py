"""How much memory is free: of a GPU, or of the machine as the system estimates it, in the limits of the process's
control groups, such as a container's. Imports torch for a GPU alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version: limit, what is used, and of memory.stat what is used and could be given back, files that were read."""


def available_bytes(device: str) -> int:
    """Bytes that are free on a torch device."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_of_the_machine(), *_in_control_groups())


def _of_the_machine() -> int:
    try:
        lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _in_control_groups() -> Iterator[int]:
    """What each control group of this process leaves: beyond that the system ends it, however much is free outside."""
    yield 1 << 62
    try:
        lines = (PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for _, controllers, place in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        version, root = (1, CONTROL_GROUPS / "memory") if controllers == "memory" else (2, CONTROL_GROUPS)
        if controllers not in ("", "memory"):
            continue
        group = root / place.lstrip("/")
        # In a container the path may be the host's, while the root is the container's own group.
        for folder in [one for one in (group, *group.parents) if one.is_relative_to(root)]:
            free = _left(folder, *_FILES[version])
            if free is not None:
                yield free


def _left(folder: Path, limit: str, used: str, given_back: str) -> int | None:
    """Bytes that a control group leaves; None where it has no limit."""
    try:
        left = int((folder / limit).read_text()) - int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(left + int(stat.get(given_back, 0)), 0)
    except (OSError, ValueError):  # "max" is no number
        return None
