"""JointChoice: one backend for prefill and one for decode over the same cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncore.registry.choice.choice import Choice


@dataclass(frozen=True)
class JointChoice:
    """Two choices that share block size, layout and cache dtype; each is created by itself."""

    prefill: Choice
    decode: Choice

    @property
    def block_size(self) -> int:
        """Tokens per block of both kernels."""
        return self.decode.block_size

    @property
    def kv_cache_layout(self) -> str:
        """The layout of the cache that both read and write."""
        return self.decode.kv_cache_layout

    @property
    def kv_cache_dtype(self) -> str:
        """The dtype of the cache; ``auto`` is the model's."""
        return self.decode.kv_cache_dtype

    def explain(self) -> str:
        """Both negotiations in words."""
        return f"prefill:\n{self.prefill.explain()}\ndecode:\n{self.decode.explain()}"

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON types."""
        return {"prefill": self.prefill.as_json(), "decode": self.decode.as_json()}
