"""StateGroup: layers that keep a state of each request instead of its keys and values, as a batch is told of them."""

from __future__ import annotations

from typing import NamedTuple

from attncore import arguments
from attncore.arguments import INT32_MAX

MOST_STATE_GROUPS = 8

NULL_SLOT_ID = 0
"""The slot of padded rows, which is no request's: kernels may read and write there."""


class StateGroup(NamedTuple):
    """Recurrent and convolutional layers (Mamba, gated delta nets) whose states lie in slots, one a request.

    A slot is a row of the engine's own tensors, and the engine gives slots out as it gives blocks out. Slot 0 is the
    null slot, of padded rows. InputBatch checks it.
    """

    name: str
    """The group's name: the key in ``block_ids`` and in ``metadata.states``."""
    num_slots: int | None = None
    """The number of slots, the null slot included: slots are below it. None: any int32."""

    @property
    def limit(self) -> int:
        """What slots are below."""
        return INT32_MAX if self.num_slots is None else self.num_slots


def checked_state_group(path: str, given: StateGroup) -> StateGroup:
    """The group with a plain name and int, each field read once; ValueError or TypeError that names the field."""
    named, num_slots = tuple.__iter__(given)
    name = arguments.name(f"{path}.name", named)
    return StateGroup(name, arguments.optional_integer(f"{path}.num_slots", num_slots, 2))
