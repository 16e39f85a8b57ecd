"""Late access made visible: a released arena is filled with a pattern, and metadata of a step that is gone raises.

For tests, with ``ATTNCORE_POISON=1``: on a GPU the same mistake reads another step's slots now and then.
"""

from __future__ import annotations

from typing import Any

from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.errors import AttncoreError

POISON = 0xA5
"""The byte that a released arena is filled with."""


class _Expiring:
    """Metadata of one step, until its arena is used again; its fields on a device until the next step is sent."""

    def __init__(self, metadata: StepMetadata) -> None:
        self.__dict__.update(_metadata=metadata, _step=metadata.step)

    def __getattr__(self, name: str) -> Any:
        metadata: StepMetadata = self.__dict__["_metadata"]
        if metadata.step != self._step:
            raise AttncoreError(
                f"metadata: step {self._step} was asked for {name!r} after its arena was taken by step "
                f"{metadata.step}; use a step's metadata before `depth` more builds, or give the builder a larger depth"
            )
        if metadata._device is not None and name in metadata._device and metadata._owner.last_step > self._step:
            raise AttncoreError(
                f"metadata: step {self._step} was asked for {name!r} on the device after step "
                f"{metadata._owner.last_step} was sent there; ask before the next build, or for metadata.host.{name}"
            )
        if name == "groups":
            return {key: _Expiring(one) for key, one in metadata.groups.items()}
        return getattr(metadata, name)


def expiring(metadata: StepMetadata) -> Any:
    """``metadata``, for this step only."""
    return _Expiring(metadata)
