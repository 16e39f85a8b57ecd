"""A call under way: whether its frame still runs, which any thread may ask.

A lock would be kept by a caller that an interrupt ended between two bytecodes; a frame ends with its caller.
"""

from __future__ import annotations

import os
import threading
from types import FrameType

_survivors: list[int] = []
"""By fork that this process came from: the thread that went on in the child."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _survivors.append(threading.get_ident()))


class RunningCall:
    """The call of ``frame``, which runs in this thread; of no generator."""

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self._frame: FrameType | None = frame
        self._num_forks = len(_survivors)

    def lasts(self) -> bool:
        """Whether it is not over. In the child of a fork, the calls of all threads but the one that forked are."""
        if any(thread != self.thread for thread in _survivors[self._num_forks :]):
            return False  # a later thread may have its ident
        frame = self._frame
        if frame is None:
            return False
        try:
            frame.clear()  # of a frame that runs: RuntimeError, whatever its thread does meanwhile. A stack may not be
            return False  # walked: the frames that its thread leaves lead nowhere.
        except RuntimeError:
            return True

    def end(self) -> None:
        """It is over: its frame, which holds all that the call was given, is let go."""
        self._frame = None
