"""The programs of a seed: of the persistent builder, of the list builder, of adopted steps."""

from __future__ import annotations

import random

from fuzz.layers.adopted_program import AdoptedProgram
from fuzz.layers.list_program import ListProgram
from fuzz.layers.model import Model
from fuzz.layers.program import Program
from fuzz.layers.settings import Tested

PROGRAMS: tuple[type[Model], ...] = Program, Program, ListProgram, AdoptedProgram


def new_program(seed: int, tested: Tested, draw: random.Random | None = None) -> Model:
    """The program that ``seed`` draws, or ``draw`` goes on to draw."""
    return PROGRAMS[seed % len(PROGRAMS)](random.Random(seed) if draw is None else draw, tested)
