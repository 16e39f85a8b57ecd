"""What ``reference`` is given, compared with what it was made for. Messages begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.ops.step_checks import check_last_slot, has_no_cache
from attncore.reference import cache as paged
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from attncore.abstract import BackendConfig, HostArrays
    from attncore.reference.causal import CausalRows


def per_head(name: str, values: Sequence[float] | Tensor | None, config: BackendConfig) -> Tensor | None:
    """One float32 number for each query head, as ``(num_kv_heads, heads a kv head)`` on the configuration's device."""
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float32, device=config.device)
    if found.shape != (config.num_heads,):
        raise ValueError(f"{name}: shape {tuple(found.shape)} found; give one for each head, {config.num_heads} in all")
    return found.view(config.num_kv_heads, -1)


def check_cache(
    config: BackendConfig, kv_cache: Any, name: str, slots: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Key cache and value cache; None where none is given and, ``slots`` (of ``name``) all being -1, none is needed."""
    if has_no_cache(kv_cache, name, slots):
        return None
    size_v = config.head_size_v or config.head_size
    if config.use_mla and not (isinstance(kv_cache, Tensor) and kv_cache.dim() == 3):
        raise ValueError("kv_cache: a latent cache (use_mla) is one tensor (num_blocks, block_size, head_size)")
    uneven = config.use_mla or size_v != config.head_size
    caches = paged.key_value(
        kv_cache, size_v if uneven and isinstance(kv_cache, Tensor) else None, config.kv_cache_layout
    )
    expected_dtype = paged.cache_dtype(config.kv_cache_dtype, config.dtype)
    if expected_dtype.itemsize == 1:  # an engine may allocate bytes
        caches = paged.as_floats(caches[0], expected_dtype), paged.as_floats(caches[1], expected_dtype)
    for cache, size in zip(caches, (config.head_size, size_v), strict=True):
        expected_block = (config.block_size, config.num_kv_heads, size)
        if cache.shape[1:] != expected_block:
            raise ValueError(
                f"kv_cache: blocks of {tuple(cache.shape[1:])} found; the configuration says {expected_block}"
            )
        if cache.dtype != expected_dtype:
            raise ValueError(f"kv_cache: {cache.dtype} found; the configuration says {expected_dtype}")
        if cache.device != device:
            raise ValueError(f"kv_cache: on {cache.device}, but the query is on {device}")
    check_last_slot(config, caches, name, slots)
    return caches


def check_table(
    caches: tuple[Tensor, Tensor] | None, block_table: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64]
) -> None:
    """Raise ValueError where there is no cache for the ``lengths[i]`` tokens that table row ``rows[i]`` is to find, or
    the row is too narrow.
    """
    if not len(rows):
        return
    if caches is None:
        raise ValueError(
            f"kv_cache: none given, but row {rows[0]} reads {counted(lengths[0], 'token')} of it; only a profiling "
            "run needs none"
        )
    if rows.max() >= len(block_table):
        raise ValueError(
            f"metadata: the block table has {counted(len(block_table), 'row')}, and none for row {rows.max()}"
        )
    block_size, width = caches[0].shape[1], block_table.shape[1]
    if lengths.max() > width * block_size:
        longest = int(lengths.argmax())
        raise ValueError(
            f"metadata: block table row {rows[longest]} has {counted(width, 'column')}, but needs "
            f"{-(-int(lengths[longest]) // block_size)} for {counted(lengths[longest], 'token')} (the cache's "
            f"block_size is {block_size})"
        )


def check_blocks(
    caches: tuple[Tensor, Tensor], block_table: Tensor, reads: tuple[NDArray[np.int64], ...], device: torch.device
) -> None:
    """On a CPU, raise ValueError where a block that is read, of ``reads`` (table rows, first and last token each),
    lies outside the cache; elsewhere looking would wait for the device.
    """
    rows, first, end = reads
    if device.type != "cpu" or not len(rows):
        return
    block_size, num_blocks = caches[0].shape[1], min(map(len, caches))
    table = block_table.numpy()[rows, : -(-int(end.max()) // block_size)]
    starts = np.arange(table.shape[1]) * block_size
    ids = table[(starts + block_size > first[:, None]) & (starts < end[:, None])]
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if len(wrong):
        raise ValueError(
            f"metadata: the block table names block {wrong[0]}, but the cache holds {counted(num_blocks, 'block')}; "
            "give the cache and the block pool the same num_blocks"
        )


def check_shared(requests: CausalRows, sliding_window: int | None, alibi_slopes: object) -> None:
    """Raise ValueError where ranks share a request's keys, and the layer counts distances among them, or its tokens are
    in spans.
    """
    if requests.span_ends is not None and requests.shared.any():
        raise ValueError(
            f"metadata: row {requests.rows[requests.shared.argmax()]} holds a rank's part of its keys, in a step with "
            "spans, whose tokens have to see all of theirs"
        )
    names = [
        name
        for name, value in (("sliding_window", sliding_window), ("alibi_slopes", alibi_slopes))
        if value is not None
    ]
    if names and requests.shared.any():
        row = requests.rows[requests.shared.argmax()]
        raise ValueError(
            f"metadata: row {row} holds a rank's part of its keys, but the layer has {names[0]}, which counts "
            "distances among all of them"
        )


def check_whole(host: HostArrays) -> None:
    """Raise ValueError where a row has context: attention without a cache has seen none of it."""
    lengths, tokens = np.asarray(host.seq_lens), np.diff(host.query_start_loc)
    some = lengths[: len(tokens)]
    wrong = np.flatnonzero((tokens > 0) & (some != tokens)) if len(some) == len(tokens) else [len(some)]
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"metadata: row {row} has {counted(tokens[row], 'token')} in this step and seq_lens "
            f"{some[row : row + 1].tolist()}; "
            "attention of type encoder_only keeps no cache, so a sequence comes whole"
        )
