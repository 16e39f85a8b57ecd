"""Arithmetic in the dtypes that are written, also inside ``torch.autocast``, which engines put around their models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operators on ``device`` keep the dtypes of their arguments."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
