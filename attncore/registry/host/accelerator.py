"""What a probe finds: one accelerator."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """An accelerator: ``cuda:sm_90``, the vendor's name for it, and its UUID as the vendor writes it."""

    device: str
    name: str
    uuid: str = ""
