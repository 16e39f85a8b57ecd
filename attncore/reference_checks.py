"""What ``reference`` is given, compared with what it was made for. Messages begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore import kv_cache as paged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from attncore.abstract import BackendConfig
    from attncore.paged_attention import Paged


def per_head(name: str, values: Sequence[float] | Tensor | None, config: BackendConfig) -> Tensor | None:
    """One float32 number for each query head, as ``(num_kv_heads, heads a kv head)`` on the configuration's device."""
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float32)
    if found.shape != (config.num_heads,):
        raise ValueError(
            f"{name}: shape {tuple(found.shape)} found; give one number for each of the {config.num_heads} heads"
        )
    return found.to(config.device).view(config.num_kv_heads, -1)


def check_forward(
    config: BackendConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Any,
    metadata: Any,
    output: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Compare what forward was given with the configuration; returns key cache and value cache, if there are."""
    dtype = getattr(torch, config.dtype)
    num_slots = len(metadata.host.slot_mapping)
    if query.dim() != 3 or len(query) < num_slots:
        raise ValueError(f"query: shape {tuple(query.shape)} found; the metadata has {num_slots} tokens")
    tensors = [
        ("query", query, config.num_heads),
        ("key", key, config.num_kv_heads),
        ("value", value, config.num_kv_heads),
    ]
    if output is not None:
        tensors.append(("output", output, config.num_heads))
    for name, tensor, heads in tensors:
        expected = (len(query), heads, config.head_size)
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} found; the query's tokens and the configuration say {expected}"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype} found; the backend was made for {dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name}: on {tensor.device}, but the query is on {query.device}")
    for name in ("slot_mapping", "block_table"):
        array = getattr(metadata, name)
        if not isinstance(array, Tensor) or array.device != query.device:
            where = f"on {array.device}" if isinstance(array, Tensor) else f"a {type(array).__name__}"
            raise ValueError(f"metadata: {name} is {where}; build it for this backend, on {query.device}")
    if kv_cache is None or (isinstance(kv_cache, Tensor) and kv_cache.numel() == 0):
        if np.max(metadata.host.slot_mapping, initial=-1) >= 0:
            raise ValueError(
                "kv_cache: none given, but slot_mapping has slots to write; only a profiling run needs none"
            )
        return None
    caches = paged.key_value(kv_cache)
    expected_dtype = paged.cache_dtype(config.kv_cache_dtype, config.dtype)
    expected_block = (config.block_size, config.num_kv_heads, config.head_size)
    for cache in caches:
        if cache.shape[1:] != expected_block:
            raise ValueError(
                f"kv_cache: blocks of {tuple(cache.shape[1:])} found; the configuration says {expected_block}"
            )
        if cache.dtype != expected_dtype:
            raise ValueError(f"kv_cache: {cache.dtype} found; the configuration says {expected_dtype}")
        if cache.device != query.device:
            raise ValueError(f"kv_cache: on {cache.device}, but the query is on {query.device}")
    return caches


def check_table(step: Paged, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Raise ValueError where table row ``rows[i]`` is too narrow for the ``lengths[i]`` tokens to be read by it."""
    block_size, width = step.key_cache.shape[1], step.block_table.shape[1]
    if lengths.max(initial=0) <= width * block_size:
        return
    longest = int(lengths.argmax())
    raise ValueError(
        f"metadata: block table row {rows[longest]} has {width} columns, but {lengths[longest]} tokens need "
        f"{-(-int(lengths[longest]) // block_size)} blocks (the cache's block_size is {block_size})"
    )
