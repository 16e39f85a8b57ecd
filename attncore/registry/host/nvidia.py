"""NVIDIA's devices, from the management library; where it is missing, from the driver library in a child process."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from attncore.registry.host.accelerator import Accelerator
from attncore.temporary_folder import temporary_folder

_ASK_DRIVER = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
number, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
found = []
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
    for index in range(number.value):
        device = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        cuda.cuDeviceGetName(name, 256, device)
        found.append((f"cuda:sm_{major.value}{minor.value}", name.value.decode(errors="replace")))
with open(sys.argv[1], "w") as file:
    json.dump({"devices": found}, file)
"""


def devices(root: Path, notes: list[str]) -> tuple[str, list[Accelerator]]:
    """The driver's version and its devices, in PCI order (in the driver library's order where that was asked)."""
    driver = driver_version(root)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        found = _ask_driver()
        if driver and not found:
            notes.append(
                f"the NVIDIA driver {driver} is loaded but neither libnvidia-ml.so.1 nor libcuda.so.1 finds a device"
            )
        return driver, found
    if code := library.nvmlInit_v2():
        notes.append(f"libnvidia-ml.so.1 is there but does not start (error {code})")
        return driver, []
    try:
        return _system_text(library, "nvmlSystemGetDriverVersion") or driver, _managed(library)
    finally:
        library.nvmlShutdown()


def driver_version(root: Path) -> str:
    """The version that /proc/driver/nvidia/version states; empty where there is no such driver."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""


def _managed(library: ctypes.CDLL) -> list[Accelerator]:
    """The devices that the management library lists."""
    number, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return []
    found = []
    for index in range(number.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue  # a device that this user may not open
        if library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            continue
        name = _device_text(library, "nvmlDeviceGetName", handle)
        uuid = _device_text(library, "nvmlDeviceGetUUID", handle)
        found.append(Accelerator(f"cuda:sm_{major.value}{minor.value}", name, uuid))
    return found


def _system_text(library: ctypes.CDLL, function: str) -> str:
    buffer = ctypes.create_string_buffer(96)
    return "" if getattr(library, function)(buffer, 96) else buffer.value.decode(errors="replace")


def _device_text(library: ctypes.CDLL, function: str, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    return "" if getattr(library, function)(handle, buffer, 96) else buffer.value.decode(errors="replace")


def _ask_driver() -> list[Accelerator]:
    """The devices that the driver library lists, without UUIDs; empty where there is none or it does not answer."""
    try:
        ctypes.CDLL("libcuda.so.1")  # opening it makes no context; cuInit, which would, runs in the child process
    except OSError:
        return []
    from attncore.registry.child_process import read_answers, run_in_child  # here: few machines need one

    with temporary_folder("host") as folder:
        answer = Path(folder, "answer")  # a file: a process that the driver starts may keep a pipe open
        run_in_child(["-I", "-S", "-c", _ASK_DRIVER, str(answer)], timeout=20)
        found = [pair for facts in read_answers(answer) for pair in facts["devices"]]
    return [Accelerator(device, name) for device, name in found]
