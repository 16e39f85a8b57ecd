"""How much memory is free: of a GPU, or of the machine as the system estimates it. Imports torch for a GPU alone."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes(device: str) -> int:
    """Bytes that are free on a torch device."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
