"""Whether torch can use a device that the caller names, asked before anything is made with it."""

from __future__ import annotations

from attncore.did_you_mean import did_you_mean
from attncore.quoted import one_line, quoted
from attncore.registry.host.host import Host


def device_problem(device: str) -> str | None:
    """Why torch cannot use ``device`` here, in words that follow the argument's name; None where it can. It imports
    torch.
    """
    problem = _problem(device)
    return problem and f"{problem}; give one that this machine has, such as cpu"


def _problem(device: str) -> str | None:
    import torch

    if not _is_known(device):
        hint = did_you_mean(device.partition(":")[0], ("cpu", "cuda"))
        return f"{quoted(device)} cannot be used here: torch has no such device{hint}"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # what torch raises for these
        return f"{quoted(device)} cannot be used here: {one_line(str(error).partition(chr(10))[0])}"
    return None


def _is_known(device: str) -> bool:
    import torch

    if device.partition(":")[0] == "mkldnn":  # torch has given it up, and would warn on standard error
        return False
    try:
        torch.device(device)
    except RuntimeError:  # its text lists every kind of device that there ever was
        return False
    return True


def host_device_problem(host: Host) -> str | None:
    """Why torch cannot use the first device of ``host`` here, and what to do; None where it can, and for a CPU."""
    if host.platform == "cpu" or (problem := _problem(host.torch_device)) is None:
        return None
    variable = "CUDA_VISIBLE_DEVICES" if host.platform == "cuda" else "HIP_VISIBLE_DEVICES"
    return (
        f"{problem}; it is the first device of the host ({host.device}): install a torch that has it, or ask for the "
        f"CPU, by create(device='cpu') or, for a command, by an empty {variable}"
    )
