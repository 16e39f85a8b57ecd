"""The small engine whose prompts with bidirectional spans run beside decodes in captured graphs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from attncore.testing.engines.captured_prompts_engine import CapturedPromptsEngine
from attncore.testing.engines.span_engine import SpanEngine

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

MOST = 40  # tokens of a span: the largest graph holds one beside decodes


class CapturedSpansEngine(CapturedPromptsEngine, SpanEngine):
    """Steps with a span run in graphs of tokens, others in any. Some prompts have none."""

    def __init__(self, backend: AttentionBackend, **engine: Any) -> None:
        self._holds_span = False
        super().__init__(backend, **engine)

    def size_for(self, num_rows: int, num_tokens: int) -> Any:
        """Any that holds them, but for spans, which graphs of decodes do not read."""
        fitting = self.fitting(num_rows, num_tokens)
        if self._holds_span or num_tokens > num_rows:
            fitting = [size for size in fitting if not isinstance(size, int)]
        return fitting[int(self.random.integers(len(fitting)))]

    def add(self, name: Hashable, tokens: int, **prefix: Any) -> None:
        super().add(name, tokens, **prefix)
        spans: list[tuple[int, int]] = []
        start = int(self.random.integers(0, 4))
        while start < tokens and len(spans) < self.random.integers(0, 5):
            stop = min(tokens, start + int(self.random.integers(1, MOST + 1)))
            spans.append((start, stop))
            start = stop + int(self.random.integers(0, 4))
        self.set_spans(name, spans)

    def replay(self, chosen: list[Any]) -> None:
        """Run a chunk of each prompt among these requests that cuts no span, where one fits, and a token of others."""
        room, scheduled = self.most_tokens - len(chosen), {}
        for name in chosen:
            if name not in self.left:
                self.grow(name)
                scheduled[name] = 1
                continue
            fitting = [n for n in self.whole(name, self.left[name]) if n <= room + 1]
            if fitting:
                scheduled[name] = tokens = int(self.random.choice(fitting))
                room -= tokens - 1
                self.left[name] -= tokens
                if not self.left[name]:
                    del self.left[name]
        self._holds_span = any(self.spans_in(name, tokens) for name, tokens in scheduled.items())
        if scheduled:
            self.replay_step(scheduled)
