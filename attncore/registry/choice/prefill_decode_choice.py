"""JointChoice: one backend for prefill and one for decode over the same cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncore.registry.choice.cache_format import choose_block_size
from attncore.registry.choice.choice import Choice, choice_of
from attncore.registry.choice.negotiate_prefill_decode import JointNegotiation
from attncore.show import guarded


@dataclass(frozen=True)
class JointChoice:
    """Two choices that share block size, layout and cache dtype; each creates its own backend.

    Whole caches of two backends may still differ in where keys and values lie. Both read the views that
    ``kv_cache_views`` of one gives, where the request asks for ``strided_kv_cache``.
    """

    prefill: Choice
    decode: Choice

    @guarded
    def __repr__(self) -> str:
        return f"JointChoice(\n prefill={self.prefill!r},\n decode={self.decode!r})"

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


def choose_joint(negotiation: JointNegotiation) -> JointChoice | None:
    """The pair that a joint negotiation chose, with a block size and a layout that both take; None without a pair.

    The block size is the one that decode prefers, else the one that prefill prefers.
    """
    if not negotiation.shares_cache:
        return None
    prefill, decode = negotiation.prefill, negotiation.decode
    chosen = (decode.chosen, prefill.chosen)
    preferred = [one.spec.preferred_block_size for one in chosen if one is not None and one.spec is not None]
    block_size = choose_block_size(negotiation.block_sizes, decode.request, preferred)
    layout = negotiation.layouts[0]
    return JointChoice(choice_of(prefill, block_size, layout), choice_of(decode, block_size, layout))
