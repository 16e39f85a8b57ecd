"""A recurrent layer: its state of each request lies in the slot that a step's metadata says."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from fuzz.layers.compared import Step
from fuzz.layers.parts import Part
from fuzz.layers.requests import Request


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

    def check(
        self, draw: random.Random, held: Mapping[str, Request], step: Step, metadata: Any, parts: list[Part]
    ) -> None:
        """Runs the layer over the parts of the step, as far as these have states; else over the step."""
        drawn = [float(draw.randint(-8, 8)) for _ in step.tokens]
        wanted = []
        for token, one in zip(step.tokens, drawn, strict=True):
            held[token.name].inputs.append(one)
            wanted.append(expected(held[token.name].inputs))
        views = {tuple(part.tokens): part for part in parts if {*part.how} <= {"decode", "prefill", "slice"}}
        covered = sorted(index for tokens in views for index in tokens)
        if covered != [*range(len(step.tokens))]:
            views = {(*range(len(step.tokens)),): None}
        found = [0.0] * len(step.tokens)
        for tokens, part in views.items():
            of_part = metadata if part is None else part.metadata["g0"]
            for index, one in zip(
                tokens, self.run(of_part.states["states"], [drawn[index] for index in tokens]), strict=True
            ):
                found[index] = one
        assert found == wanted, f"states: {found} found, {wanted} expected"


def expected(inputs: list[float]) -> float:
    """The output of the last token of a request."""
    state = 0.0
    for token in inputs:
        state = state / 2 + token
    return state
