"""RequestFields: an AttentionRequest's fields as a type, for the functions that take them as keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch


class RequestFields(TypedDict, total=False):
    """The fields of an AttentionRequest, for the functions that take them as keyword arguments."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str | torch.dtype
    head_size_v: int | None
    kv_cache_dtype: str | torch.dtype
    block_size: int | None
    manager_block_size: int | None
    kv_cache_layout: str | None
    max_model_len: int | None
    num_blocks: int | None
    sliding_window: int | None
    logits_soft_cap: float | None
    alibi: bool | Literal["standard"]
    sinks: bool
    strided_kv_cache: bool
    use_mla: bool
    features: Iterable[str]
    cuda_graph: str
    phase: Literal["prefill", "decode"] | None
    allow_compile: bool
    backend: str | None
    prefer: Iterable[str]
    exclude: Iterable[str]
    policy: Literal["strict", "fallback"]
    options: Mapping[str, Mapping[str, Any]]
