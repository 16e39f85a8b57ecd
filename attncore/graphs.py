"""Whether a stream is capturing a CUDA graph."""

from __future__ import annotations

import sys


def is_capturing(device: str) -> bool:
    """Whether the current stream of ``device`` (as torch writes it) is capturing a graph."""
    torch = sys.modules.get("torch")
    return device.startswith("cuda") and torch is not None and bool(torch.cuda.is_current_stream_capturing())
