"""Accelerator: one device, as the probe of its vendor finds it."""

from __future__ import annotations

from typing import NamedTuple


class Accelerator(NamedTuple):
    """An accelerator: its device (``cuda:sm_90``), the vendor's name for it, and its UUID as the vendor writes it."""

    device: str
    name: str
    uuid: str = ""
