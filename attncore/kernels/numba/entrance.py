"""Entrance: one caller at a time, and what an interrupted one began is undone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np


class Entrance:
    def __init__(self) -> None:
        self.inside: Stay | None = None
        self.undo: list[tuple[Any, ...]] = []
        self.refused: Callable[[], Exception] = RuntimeError
        self.taken = np.zeros(1, np.int64)
        """Not 0 while somebody is inside, and where something is left to undo: no loop runs a step without entering."""

    @property
    def busy(self) -> bool:
        return self.inside is not None and self.inside.lasts()

    @property
    def unfinished(self) -> bool:
        return bool(self.undo) and not self.busy

    def enter(self) -> Stay:
        stay, last = Stay(self, sys._getframe(1)), self.inside
        if last is not None and last.lasts():
            raise self.refused()
        if self.inside is not last:
            raise self.refused()
        self.inside = stay  # nothing is called since the comparison, so that no other thread comes between
        self.taken[0] = 1
        return stay

    def check_reader(self) -> None:
        stay = self.inside
        if stay is not None and stay.thread != threading.get_ident() and stay.lasts():
            raise self.refused()

    def roll_back(self) -> None:
        while self.undo:
            function, *args = self.undo[-1]
            function(*args)
            self.undo.pop()


class Stay:
    def __init__(self, entrance: Entrance, frame: FrameType) -> None:
        self.entrance, self.frame, self.thread = entrance, frame, threading.get_ident()

    def lasts(self) -> bool:
        """Whether the caller's frame is on its thread's stack: an interrupted caller may never reach ``__exit__``.

        Another thread runs on while its stack is walked, and a frame that it leaves leads nowhere: who is not found is
        looked for again.
        """
        for _ in range(1 if self.thread == threading.get_ident() else 4):
            frame = sys._current_frames().get(self.thread)
            while frame is not None and frame is not self.frame:
                frame = frame.f_back
            if frame is not None:
                return True
        return False

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
    stay.entrance.inside = None
