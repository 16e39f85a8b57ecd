"""What the plugin calls of FlashInfer, as one object: tests hand over another one, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple


class Library(NamedTuple):
    """FlashInfer's public names, by what they are for."""

    decode: Callable[..., Any]
    """BatchDecodeWithPagedKVCacheWrapper"""
    prefill: Callable[..., Any]
    """BatchPrefillWithPagedKVCacheWrapper"""
    fast_decode_plan: Callable[..., None]
    """Plans a decode wrapper that was planned before, without copies of what the caller keeps on the device."""
    merge_state_in_place: Callable[..., None]
    xqa: Callable[..., Any]
    """xqa_batch_decode_with_kv_cache"""
    version: str = ""
    latent: Callable[..., Any] | None = None
    """BatchMLAPagedAttentionWrapper"""
    latent_rows: Callable[..., Any] | None = None
    """MLAPlanMetadata.csr: a step's page list and lengths, as plans of the wrapper above take them."""


@lru_cache(maxsize=1)
def flashinfer() -> Library:
    """The library that is installed. Its import takes seconds and needs no GPU."""
    from flashinfer import __version__, cascade, decode, mla, prefill

    return Library(
        decode.BatchDecodeWithPagedKVCacheWrapper,
        prefill.BatchPrefillWithPagedKVCacheWrapper,
        decode.fast_decode_plan,
        cascade.merge_state_in_place,
        decode.xqa_batch_decode_with_kv_cache,
        __version__,
        mla.BatchMLAPagedAttentionWrapper,
        mla.MLAPlanMetadata.csr,
    )
