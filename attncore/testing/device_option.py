"""The option ``--device`` of the commands that run a backend's steps, checked before anything is made with it."""

from __future__ import annotations

from attncore.command import UsageError
from attncore.did_you_mean import did_you_mean
from attncore.quoted import one_line, quoted


def check_device(device: str | None) -> None:
    """UsageError for what torch takes for no device, or for one that it cannot use here. It imports torch."""
    if device is None:
        return
    import torch

    try:
        torch.device(device)
    except RuntimeError:  # its text lists every kind of device that there ever was
        hint = did_you_mean(device.partition(":")[0], ("cpu", "cuda"))
        raise UsageError(
            f"--device: {quoted(device)} cannot be used here: torch has no such device; give cpu, cuda or cuda:1{hint}"
        ) from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # what torch raises for these
        first = one_line(str(error).partition("\n")[0])
        raise UsageError(f"--device: {quoted(device)} cannot be used here: {first}") from None
