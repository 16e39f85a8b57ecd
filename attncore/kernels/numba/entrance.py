"""Entrance: one caller at a time, and what an interrupted one began is undone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from attncore.running_call import RunningCall


class Entrance:
    def __init__(self) -> None:
        self.last: Stay | None = None
        """Of the caller inside, or of the one before: each enters with a new one."""
        self.undo: list[tuple[Any, ...]] = []
        self.refused: Callable[[], Exception] = RuntimeError
        self.taken = np.zeros(1, np.int64)
        """Not 0 while somebody is inside, and where something is left to undo: no loop runs a step without entering."""

    @property
    def entered(self) -> object:
        """Another one once a caller came in."""
        return self.last

    @property
    def busy(self) -> bool:
        return self.last is not None and self.last.lasts()

    @property
    def unfinished(self) -> bool:
        last = self.last
        # Compared at the end: what there is to undo may be another thread's, who entered meanwhile.
        return last is not None and not last.lasts() and bool(self.undo) and self.last is last

    def enter(self) -> Stay:
        stay = Stay(self, sys._getframe(1))
        while True:
            last = self.last
            if last is not None and last.lasts():
                raise self.refused()
            if self.last is last:  # or a call of a signal's handler, or of another thread, came and went
                self.last = stay  # nothing is called since the comparison, so that no other caller comes between
                self.taken[0] = 1
                return stay

    def check_reader(self) -> None:
        last = self.last
        if last is not None and last.thread != threading.get_ident() and last.lasts():
            raise self.refused()

    def roll_back(self) -> None:
        while self.undo:
            function, *args = self.undo[-1]
            function(*args)
            self.undo.pop()


class Stay(RunningCall):
    """It lasts while its caller's frame runs: an interrupted caller may never reach ``__exit__``."""

    def __init__(self, entrance: Entrance, frame: FrameType) -> None:
        super().__init__(frame)
        self.entrance = entrance

    def __enter__(self) -> None:
        self.entrance.roll_back()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self.entrance.undo.clear()
            else:
                self.entrance.roll_back()
        finally:
            leave(self)


def leave(stay: Stay) -> None:
    if not stay.entrance.undo:
        stay.entrance.taken[0] = 0  # before: the next to enter takes it
    stay.end()
