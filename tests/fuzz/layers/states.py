"""A recurrent layer: its state of each request lies in the slot that a step's metadata says."""

from __future__ import annotations

from typing import Any

import numpy as np


class RecurrentLayer:
    """Each token's output is half of the one before, and its own input."""

    def __init__(self, slots: int) -> None:
        self.held = np.full(slots, np.nan)

    def run(self, states: Any, inputs: list[float]) -> list[float]:
        """Over ``metadata.states[group]`` of a part, whose tokens have ``inputs``."""
        slots, begun, starts = (
            one.tolist() for one in (states.state_slot, states.has_initial_state, states.query_start_loc)
        )
        found = []
        for slot, has_state, start, stop in zip(slots, begun, starts[:-1], starts[1:], strict=True):
            state = self.held[slot] if has_state else 0.0
            for token in inputs[start:stop]:
                state = state / 2 + token
                found.append(state)
            if stop > start:
                self.held[slot] = state
        return found


def expected(inputs: list[float]) -> float:
    """The output of the last token of a request."""
    state = 0.0
    for token in inputs:
        state = state / 2 + token
    return state
