"""Host: a machine as a value. Negotiation reads nothing else of a machine, so any machine can answer for any other."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from attncore.arguments import integer
from attncore.frozen_map import FrozenMap
from attncore.quoted import quoted
from attncore.registry.device_patterns import canonical
from attncore.registry.package_requirements import canonical_name
from attncore.show import angled, counted, cut, guarded


@dataclass(frozen=True, kw_only=True, repr=False)
class Host:
    """A machine: its device, how many of them, and what is installed.

    ``packages`` maps names of distributions (normalised as by PEP 503) to versions. A name that it lacks is not
    installed; ``select`` first fills in the versions installed here. An empty version says "not installed" whatever is
    installed here.
    """

    device: str
    """``cpu``, ``cuda:sm_90``, ``rocm:gfx942``."""
    device_name: str = ""
    """The vendor's name for it."""
    device_count: int = 1
    """Visible devices of the same architecture; 1 for a CPU."""
    driver: str = ""
    """Version of the device's driver."""
    machine: str = field(default_factory=platform.machine)
    """The processor's architecture: ``x86_64``, ``aarch64``."""
    cpu_flags: frozenset[str] = frozenset()
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version."""
    assumed: bool = False
    """Whether the machine is described by the caller rather than probed."""
    notes: tuple[str, ...] = ()
    """What else the probe finds: a driver without a device, devices of several kinds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", canonical(self.device))
        for name in ("device_name", "driver", "machine"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name}: {quoted(value)} is not a string")
        object.__setattr__(self, "device_count", integer("device_count", self.device_count, 0))
        object.__setattr__(self, "packages", FrozenMap(_normalised(self.packages)))

    @guarded
    def __repr__(self) -> str:
        number = f"{self.device_count} devices" if self.device_count > 1 else ""
        facts = (
            "assumed" if self.assumed else "probed", cut(self.device_name, 40), number,
            f"driver {cut(self.driver, 24)}" if self.driver else "", self.machine,
            counted(len(self.packages), "package"),
            *(f"note: {note}" for note in self.notes[:3]),
        )  # fmt: skip
        return angled(f"Host {self.device}", facts)

    @property
    def platform(self) -> str:
        """``cpu``, ``cuda`` or ``rocm``."""
        return self.device.partition(":")[0]

    @property
    def arch(self) -> str:
        """``sm_90``, ``gfx942``; ``cpu`` for a CPU."""
        return self.device.partition(":")[2] or self.device

    @property
    def torch_device(self) -> str:
        """What torch calls the first device: ``cuda:0`` (for ROCm too) or ``cpu``."""
        return "cpu" if self.platform == "cpu" else "cuda:0"

    @classmethod
    def probe(cls) -> Host:
        """This machine, probed without torch and without a CUDA context; cached for the process."""
        return _probe()

    @classmethod
    def assume(cls, device: str, *, packages: Mapping[str, str] | None = None) -> Host:
        """A machine that need not be this one: ``cuda:sm_90`` or ``sm_90``, ``rocm:gfx942`` or ``gfx942``, ``cpu``.

        ``packages`` states what is installed there; for other names, what is installed here counts. TypeError where it
        is no mapping of strings to strings.
        """
        return cls(device=device, packages={} if packages is None else packages, assumed=True)

    def with_packages(self, found: Mapping[str, str]) -> Host:
        """The same host, with ``found`` for the names that it does not hold."""
        return replace(self, packages={**_normalised(found), **self.packages}) if found else self

    def stating(self, packages: Mapping[str, str]) -> Host:
        """The same host, with ``packages`` whatever it held for their names."""
        return replace(self, packages={**self.packages, **_normalised(packages)})

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON types, without CPU flags."""
        return {
            "device": self.device,
            "device_name": self.device_name,
            "device_count": self.device_count,
            "driver": self.driver,
            "machine": self.machine,
            "packages": dict(sorted(self.packages.items())),
            "assumed": self.assumed,
            "notes": list(self.notes),
        }


def _normalised(packages: Mapping[str, str]) -> dict[str, str]:
    """``packages`` by canonical names; TypeError where it is no mapping of strings to strings."""
    if not isinstance(packages, Mapping):
        raise TypeError(f"packages: {quoted(packages)} is not a mapping of distributions to versions")
    for name, version in packages.items():
        if not isinstance(name, str):
            raise TypeError(f"packages: {quoted(name)} is not the name of a distribution")
        if not isinstance(version, str):
            raise TypeError(
                f"packages: the version of {quoted(name)} is {quoted(version)}, not a string such as '2.10'"
            )
    return {canonical_name(name): version for name, version in packages.items()}


@lru_cache(maxsize=1)
def _probe() -> Host:
    from attncore.registry.host.probe import probe  # it loads ctypes and subprocess, which an assumed host does without

    return Host(**probe()._asdict())
