"""What an engine's callers ask of it: prompts, checked when they arrive, and what is said after them, as it comes."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from request import Request

from attncore.arguments import INT32_MAX, float32_number, integer, integer_or_none
from attncore.integrations.transformers import image_spans
from attncore.quoted import quoted
from attncore.show import counted


class TakesPrompts:
    """The part of Engine that makes requests of prompts and reads their output."""

    tokenizer: Any
    max_model_len: int
    vocab_size: int
    block_size: int
    pool: Any
    waiting: deque[Request]
    running: dict[int, Request]
    model: Any
    builder: Any
    images: dict[int, Any] | None
    step: Any
    cancel: Any
    _ids: itertools.count[int]

    def add_request(self, prompt: list[int] | str, max_new_tokens: int, **sampling: Any) -> Request:
        """Queues a request, with ``temperature`` and ``stop`` tokens (of a text: its tokenizer's end, unless given).
        ValueError where it can never run."""
        self.waiting.append(request := self.request(prompt, max_new_tokens, **sampling))
        return request

    def request(
        self, prompt: Any, max_new_tokens: int, *, temperature: float = 0.0, stop: tuple[int, ...] | None = None,
        images: Any = None,
    ) -> Request:  # fmt: skip
        """What ``add_request`` queues. Threads may make requests while another one calls ``step``.

        ``images`` are the pixels of the prompt's images, (n, channels, height, width); the prompt has their places."""
        decode = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt: text, and the engine has no tokenizer; make it with one, or give token ids")
            how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            decode = functools.partial(self.tokenizer.decode, **how)
            stop = (self.tokenizer.eos_token_id,) if stop is None and self.tokenizer.eos_token_id is not None else stop
            prompt = self.tokenizer.encode(prompt)
        prompt, ends = self._tokens("prompt", prompt), self._tokens("stop", () if stop is None else stop)
        max_new_tokens = integer("max_new_tokens", max_new_tokens, -INT32_MAX)
        longest = len(prompt) + max_new_tokens
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"prompt: length {len(prompt)}, max_new_tokens: {max_new_tokens}; both must be at least 1")
        temperature = float(float32_number("temperature", temperature))  # which it is sent to the device as
        if temperature < 0:
            raise ValueError(f"temperature: {temperature}; give 0 for greedy decoding, or a positive number")
        if longest > self.max_model_len:
            raise ValueError(f"prompt: length {longest} with max_new_tokens exceeds max_model_len {self.max_model_len}")
        if -(-longest // self.block_size) > self.pool.num_blocks - 1:
            raise ValueError(f"prompt: length {longest} needs more than the pool's blocks, {self.pool.num_blocks - 1}")
        return Request(
            next(self._ids), prompt, len(prompt), max_new_tokens, temperature, frozenset(ends), decode=decode,
            spans=[] if images is None else self._image_spans(prompt, images), images=images,
        )  # fmt: skip

    def _image_spans(self, prompt: list[int], images: Any) -> list[tuple[int, int]]:
        """Where the images of a prompt are; ValueError where these are not as many, or one fits no step."""
        if self.images is None:
            raise ValueError("images: the engine was made without; make it with images=True")
        spans, most = image_spans(self.model, prompt), self.builder.max_num_batched_tokens
        if len(images) != len(spans):
            raise ValueError(f"images: {len(images)} given for {len(spans)} places in the prompt")
        if (longest := max((stop - start for start, stop in spans), default=0)) > most:
            raise ValueError(f"images: one has {counted(longest, 'token')}, and a step {most} (max_num_batched_tokens)")
        return spans

    def _tokens(self, name: str, given: Any) -> list[int]:
        """Token ids as ints; a wrong one would fail in the model, in the middle of everybody's step."""
        try:
            given = list(given)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; give a list of token ids") from None
        tokens = [integer_or_none(token) for token in given]
        if None in tokens:
            kind = type(given[tokens.index(None)]).__name__
            raise TypeError(f"{name}: '{kind}' object cannot be interpreted as an integer; give a list of token ids")
        if wrong := [quoted(token) for token in tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"{name}: token {wrong[0]} is outside 0..{self.vocab_size - 1}, the vocabulary")
        return tokens

    def generate(self, prompts: Any, max_new_tokens: int, **sampling: Any) -> Iterator[tuple[int, Any]]:
        """``(number of its prompt, token)`` for every new token, as it comes; a piece of text for a prompt in words.

        ValueError at once, with none queued, where one can never run; the error of one that is dropped, at the end.
        Who stops reading cancels what still runs."""
        if isinstance(prompts, str):
            raise TypeError("prompts: one text; give a list of them")  # else each letter would be a prompt
        prompts = list(prompts)
        if prompts and all(isinstance(prompt, int | np.integer) for prompt in prompts):
            raise TypeError("prompts: the token ids of one prompt; give a list of prompts, such as [[1, 2, 3]]")
        return self._streamed([self.request(prompt, max_new_tokens, **sampling) for prompt in prompts])

    def _streamed(self, requests: list[Request]) -> Iterator[tuple[int, Any]]:
        self.waiting += requests
        try:
            running = True
            while running:
                self.step()
                # Asked before what came is read: a reader may run steps of other requests, and of these, meanwhile.
                running = bool(self.waiting or self.running) and not all(one.finished or one.error for one in requests)
                for number, request in enumerate(requests):
                    yield from ((number, piece) for piece in request.news())
        finally:
            for request in requests:
                self.cancel(request)
        if error := next((request.error for request in requests if request.error), None):
            raise error

    def complete(self, prompts: Any, max_new_tokens: int, **sampling: Any) -> list[Any]:
        """The whole output of each prompt, token ids or text, and otherwise as ``generate``."""
        prompts = prompts if isinstance(prompts, str) else list(prompts)
        outputs: list[list[Any]] = [[] for _ in prompts]
        for number, piece in self.generate(prompts, max_new_tokens, **sampling):
            outputs[number].append(piece)
        return ["".join(out) if isinstance(one, str) else out for one, out in zip(prompts, outputs, strict=True)]


if __name__ == "__main__":
    raise SystemExit("prompts.py is a module; run generate.py beside it")
