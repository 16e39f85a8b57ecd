"""``attncore.show_versions``: what a report of a problem needs to say about the environment."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from attncore._version import __version__
from attncore.installed_metadata import installed_version
from attncore.quoted import describe_error, one_line
from attncore.registry.choice.installed import backends
from attncore.registry.host.host import Host
from attncore.show import table

PACKAGES = ("numpy", "pluggy", "rich", "torch", "numba", "triton", "transformers")


def version_of(name: str) -> str | None:
    """The installed version of a distribution, from its metadata; None where it is not installed."""
    try:
        return installed_version(name)
    except Exception:
        return None


def versions() -> dict[str, str]:
    """Python's version, attncore's, and those of PACKAGES that are installed."""
    found = {"attncore": __version__, "python": platform.python_version()}
    return found | {name: version for name in PACKAGES if (version := version_of(name))}


def show_versions() -> None:
    """Print what a report of a problem needs: versions, the kernels in use, the host, and the plugins.

    torch is not imported; where the program has loaded it, its device is printed too.
    """
    print(table(("WHAT", "FOUND"), [(name, one_line(found)) for name, found in _facts()]))
    try:
        print(f"\n{backends()!r}")
    except Exception as error:  # a bad ATTNCORE_ variable, or a plugin under ATTNCORE_STRICT_PLUGINS
        print(f"\nbackends: {describe_error(error)}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "attncore", __version__
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    yield "platform", platform.platform()
    for name in PACKAGES:
        yield name, version_of(name) or "not installed"
    yield "kernels", _kernels()
    host = Host.probe()
    yield "host", " ".join(part for part in (host.device, host.device_name, host.driver) if part)
    for note in host.notes:
        yield "note", note
    if "torch" in sys.modules:
        yield "torch's device", _torch_device()


def _kernels() -> str:
    try:
        from attncore.kernels import why_kernels

        return why_kernels()
    except (ImportError, ValueError) as error:
        return str(error)


def _torch_device() -> str:
    """The device of the torch that is loaded; one that the program has not initialised is left alone."""
    import torch

    try:
        built = torch.version.hip or torch.version.cuda
        if not built:
            return "cpu (built without CUDA)"
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return f"built for {built}, not initialised"
        return f"{torch.cuda.get_device_name()} (built for {built})"
    except Exception as error:  # a driver in an unforeseen state
        return describe_error(error)
