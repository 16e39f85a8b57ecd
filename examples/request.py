"""A request of the engine: its tokens, how far they are computed, and what of its output was read."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Request:
    """One sequence: its prompt and what was generated, in ``tokens``; the first ``computed`` are in the cache."""

    id: int
    tokens: list[int]
    num_prompt: int
    max_new_tokens: int
    temperature: float
    stop: frozenset[int]
    computed: int = 0
    launched: int = 0  # with those of steps whose tokens were not read yet
    place: int = 0  # of what is sampled for it, on the device
    blocks: list[int] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)  # of its full blocks, each made of the one before and its tokens
    error: Exception | None = None  # why it was dropped: its step failed though it ran alone
    spans: list[tuple[int, int]] = field(default_factory=list)  # where images are, whose pixels are ``images``
    images: Any = None
    decode: Callable[[list[int]], str] | None = None  # makes text of its output, where its prompt was text
    read: int = 0  # tokens of its output that ``news`` has read, and letters that it has given
    told: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def left(self) -> int:
        """How many tokens are to be launched, as far as the host knows: those of steps that sample none end it."""
        return self.num_prompt + self.max_new_tokens - 1 - self.launched

    @property
    def next(self) -> int:
        """How many tokens a step can run: all that are known, or the one that is being sampled."""
        return min(max(len(self.tokens) - self.launched, 1), self.left)

    def fitting(self, room: int) -> int:
        """How many tokens a step with room for so many runs: no image is cut. 0: the next one does not fit."""
        count = min(self.next, room)
        for start, stop in self.spans:
            if start < self.launched + count < stop:
                count = start - self.launched
        return count

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens or (bool(self.output) and self.tokens[-1] in self.stop)

    def news(self) -> list[Any]:
        """What was generated since the last call: tokens, or a text that ends with a whole letter."""
        new = self.tokens[self.num_prompt + self.read :]
        self.read += len(new)
        if not new or self.decode is None:
            return new
        text = self.decode(self.tokens[self._shown_from :])[self._of_prompt :]
        text = text if self.finished else text.rstrip("\ufffd")  # the first bytes of a letter whose others follow
        # Shorter than before where such bytes stand behind whole letters that are bytes, too: all are U+FFFD then.
        told, self.told = self.told, max(self.told, len(text))
        return [text[told:]] if text[told:] else []

    @functools.cached_property
    def _shown_from(self) -> int:
        """The token that is decoded first: of the prompt, since many tokenizers drop a space at the beginning; and one
        that begins a letter, since some make U+FFFD of all bytes behind those of a part of one."""
        last = max(0, self.num_prompt - 4)
        for first in range(last, max(0, last - 3) - 1, -1):  # a letter has four bytes at most
            if not self.decode(self.tokens[first : self.num_prompt]).startswith("\ufffd"):
                return first
        return last

    @functools.cached_property
    def _of_prompt(self) -> int:
        """How many letters are the prompt's."""
        return len(self.decode(self.tokens[self._shown_from : self.num_prompt]))

    def key(self, index: int, size: int) -> Any:
        while (n := len(self.keys)) <= index:
            said = np.array(self.tokens[n * size : (n + 1) * size]).tobytes()
            self.keys.append(hashlib.sha256((self.keys[-1] if n else b"") + said).digest())
        return self.keys[index]


if __name__ == "__main__":
    raise SystemExit("request.py is a module; run generate.py beside it")
