"""The devices that CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attncore.registry.host.accelerator import Accelerator


def visible_devices(
    devices: Sequence[Accelerator], variables: Sequence[str], environ: Mapping[str, str]
) -> list[Accelerator]:
    """The devices that ``variables`` leave visible, in the order that they state.

    An entry is an index or the beginning of a UUID; as in CUDA, everything after an entry that names no device is
    ignored. Each variable selects among the devices that those before it leave.
    """
    left = list(devices)
    for variable in variables:
        entries = environ.get(variable)
        if entries is None:
            continue
        chosen: list[Accelerator] = []
        for entry in (part.strip() for part in entries.split(",")):
            if entry.isdecimal() and len(entry) < 10 and int(entry) < len(left):  # Python reads no thousands of digits
                chosen.append(left[int(entry)])
            elif entry.startswith("MIG-") and left:  # a slice of some device: its architecture is that of the whole
                chosen.append(left[0])
            elif entry and (named := [device for device in left if device.uuid and device.uuid.startswith(entry)]):
                chosen.append(named[0])
            else:
                break
        left = chosen
    return left
