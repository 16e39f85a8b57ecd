"""StateStep: a step as the layers of one group of states see it."""

from __future__ import annotations

from typing import Any


def field_name(group: str) -> str:
    """The name of a group's field in arenas, which is no attribute's name: it has a point."""
    return f"{group}.state_slot"


class StateStep:
    """Which state each row of a step continues, and whether it has one. Made by a build: ``metadata.states[group]``.

    Fields are tensors on the device where ``metadata``'s are, at fixed addresses in captured sizes; ``host`` has them
    as read-only NumPy arrays. Valid as long as the metadata is.
    """

    __slots__ = ("_field", "_step", "group")

    def __init__(self, step: Any, group: str) -> None:
        self._step, self.group, self._field = step, group, field_name(group)

    @property
    def state_slot(self) -> Any:
        """int32[n]: the slot of the row's state; 0, the null slot, in padded rows."""
        return getattr(self._step, self._field)

    @property
    def has_initial_state(self) -> Any:
        """bool[n]: whether the slot holds a state of the row's earlier tokens; False: the layer begins with zeros.

        Computed on access (``context_lens > 0``): take it once a step. In a capture the graph computes it.
        """
        return self._step.context_lens > 0

    @property
    def query_start_loc(self) -> Any:
        """int32[n + 1]: where the row's tokens start; padded rows have none."""
        return self._step.query_start_loc

    @property
    def host(self) -> StateStep:
        """The same fields on the host."""
        return StateStep(self._step.host, self.group)

    def of_rows(self, view: Any, first: int, last: int) -> StateStep:
        """The states of rows ``first:last``, which ``view`` is a view of."""
        return StatesOfRows(view, self.group, self.state_slot[first:last], self.host.state_slot[first:last])

    def __repr__(self) -> str:
        return f"<StateStep of group {self.group!r} of {self._step!r}>"


class StatesOfRows(StateStep):
    """The same of some rows of a step, or of a step ahead, whose slots were taken of the step that was built."""

    __slots__ = ("_on_host", "_slots")

    def __init__(self, step: Any, group: str, slots: Any, on_host: Any) -> None:
        super().__init__(step, group)
        self._slots, self._on_host = slots, on_host

    @property
    def state_slot(self) -> Any:
        """See the base class."""
        return self._slots

    @property
    def host(self) -> StateStep:
        """See the base class."""
        return StatesOfRows(self._step.host, self.group, self._on_host, self._on_host)
