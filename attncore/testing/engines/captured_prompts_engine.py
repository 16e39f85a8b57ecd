"""The small engine whose prompts, in chunks and whole, run beside decodes in captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.testing.engines.captured_engine import CapturedEngine

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

SIZES = (2, 4, 8, (2, 6), (4, 24), (6, 6), (8, 96))
"""Rows of graphs of decodes; rows and tokens of those of prompts. Both of the same rows: a plan that is kept by these
alone is another's. One has as many tokens as rows, which are no decodes for that."""


class CapturedPromptsEngine(CapturedEngine):
    """All steps run through graphs of so many rows and tokens, ``sizes``. A request's prompt runs in chunks of any
    length."""

    def __init__(self, backend: AttentionBackend, *, sizes: tuple[Any, ...] = SIZES, **engine: Any) -> None:
        block_size = backend.config.block_size
        longest = max(3 * block_size, 80)
        most_rows = max(size[0] if isinstance(size, tuple) else size for size in sizes)
        num_blocks = most_rows * -(-longest // block_size) + 8
        super().__init__(backend, 1, sizes=sizes, longest=longest, num_blocks=num_blocks, **engine)
        self.left: dict[Any, int] = {}  # tokens of prompts that did not run yet

    def size_for(self, num_rows: int, num_tokens: int) -> Any:
        """Any that holds them: decodes run in graphs of prompts, too."""
        fitting = self.fitting(num_rows, num_tokens)
        if num_tokens > num_rows:
            fitting = [size for size in fitting if not isinstance(size, int)]
        return fitting[int(self.random.integers(len(fitting)))]

    def change(self) -> None:
        """Remove requests and add others; now and then replay an empty step."""
        for name in list(self.batch.req_ids):
            if self._is_full(name) or self.random.random() < 0.05:
                self.remove(name)
                self.left.pop(name, None)
        wanted = int(self.random.integers(1, self.most_rows + 1))
        while len(self.batch) < wanted:
            name, length = next(self.names), int(self.random.integers(1, self.longest))
            self.add(name, length)
            self.left[name] = length
        if self.random.random() < 0.1:
            self.replay_empty()

    def replay(self, chosen: list[Any]) -> None:
        """Run a chunk of each prompt among these requests, and a token of each other, as far as some graph goes."""
        sizes = self.fitting(len(chosen), len(chosen))
        room = self.size_of(sizes[int(self.random.integers(len(sizes)))])[1]
        scheduled = {}
        for place, name in enumerate(chosen):
            most = min(self.left.get(name, 1), room - (len(chosen) - place - 1))
            scheduled[name] = tokens = int(self.random.integers(1, most + 1)) if self.random.random() < 0.5 else most
            room -= tokens
            if name not in self.left:
                self.grow(name)
            elif tokens == self.left[name]:
                del self.left[name]
            else:
                self.left[name] -= tokens
        self.replay_step(scheduled)
