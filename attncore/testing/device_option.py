"""The option ``--device`` of the commands that run a backend's steps, checked before anything is made with it."""

from __future__ import annotations

from attncore.command import UsageError
from attncore.registry.choice.device_here import device_problem


def check_device(device: str | None) -> None:
    """UsageError for what torch takes for no device, or for one that it cannot use here. It imports torch."""
    if device is not None and (problem := device_problem(device)):
        raise UsageError(f"--device: {problem}")
