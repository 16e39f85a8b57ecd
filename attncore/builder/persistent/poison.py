"""Poison, which makes late access visible: a released arena is filled with a pattern, and expired metadata raises.

For tests, with ``ATTNCORE_POISON=1``. Without it, the same mistake on a GPU reads another step's slots now and then.
"""

from __future__ import annotations

from typing import Any

from attncore.builder.persistent.state_step import StateStep
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.errors import AttncoreError
from attncore.show import guarded

POISON = 0xA5
"""The byte that a released arena is filled with."""


class _Expiring:
    """Metadata of one step that raises once its arena is used again; device fields raise once the next step is sent."""

    def __init__(self, metadata: StepMetadata) -> None:
        self.__dict__.update(_metadata=metadata, _step=metadata.step)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:  # what takes metadata of a step takes this
        real: type[Any] = self._metadata.__class__
        return real

    def __copy__(self) -> _Expiring:
        return _Expiring(self._metadata)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every object by copy and pickle, before it has any attribute
            raise AttributeError(name)
        metadata: StepMetadata = self.__dict__["_metadata"]
        if (later := self._later()) is not None:
            raise AttncoreError(
                f"metadata: step {self._step} was asked for {name!r} after its arena was taken by step "
                f"{later}; use a step's metadata before `depth` more builds, or give the builder a larger depth"
            )
        if metadata._device is not None and name in metadata._device and metadata._owner.moved_on(self._step):
            later = max(metadata._owner.last_step, self._step + 1)
            raise AttncoreError(
                f"metadata: step {self._step} was asked for {name!r} on the device after step "
                f"{later} was sent there; ask before the next build, or for metadata.host.{name}"
            )
        if name == "groups":
            return {key: _Expiring(of_group) for key, of_group in metadata.groups.items()}
        if name == "states":
            return {key: StateStep(self, key) for key in metadata.states}
        return getattr(metadata, name)

    def _later(self) -> int | None:
        """The step that has taken the arena, whatever its shape, each of which has StepArenas of its own; or None."""
        metadata: StepMetadata = self.__dict__["_metadata"]
        own, owner = metadata._arena, metadata._owner
        held = owner.kernel.last[self._step % len(owner.kernel.last)]
        if own.step == self._step and held is own:
            return None
        return int(owner.last_step + 1 if held is None or held.step == self._step else held.step)

    @guarded
    def __repr__(self) -> str:
        if (later := self._later()) is not None:
            return f"<{type(self._metadata).__name__} of step {self._step}: STALE: its arena was taken by step {later}>"
        return repr(self._metadata)

    @guarded
    def __str__(self) -> str:
        return str(self._metadata) if self._later() is None else repr(self)

    def __dir__(self) -> list[str]:
        return dir(self._metadata)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._metadata.__reduce_ex__(protocol)


def expiring(metadata: StepMetadata) -> Any:
    """``metadata`` in a wrapper that raises AttncoreError once the step has expired."""
    return _Expiring(metadata)
