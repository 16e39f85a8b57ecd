"""What ``reference`` is given, compared with what it was made for. Messages begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.abstract import AttentionType
from attncore.ops.written_tensor import check_strided, check_written
from attncore.quoted import type_name
from attncore.reference import cache as paged
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from attncore.abstract import AttentionMetadata, BackendConfig, HostArrays
    from attncore.reference.causal import CausalRows

#: What each type of attention reads: the host's arrays, and of those the ones that it reads on the device.
HOST_FIELDS = {
    AttentionType.DECODER: ("slot_mapping", "query_start_loc", "seq_lens"),
    AttentionType.ENCODER_ONLY: ("query_start_loc", "seq_lens"),
    AttentionType.ENCODER: ("encoder_query_start_loc",),
    AttentionType.ENCODER_DECODER: (
        "query_start_loc",
        "encoder_seq_lens",
        "encoder_query_lens",
        "encoder_query_start_loc",
        "cross_slot_mapping",
    ),
}
DEVICE_FIELDS = {
    AttentionType.DECODER: ("slot_mapping", "block_table"),
    AttentionType.ENCODER_DECODER: ("cross_slot_mapping", "cross_block_table"),
}


def per_head(name: str, values: Sequence[float] | Tensor | None, config: BackendConfig) -> Tensor | None:
    """One float32 number for each query head, as ``(num_kv_heads, heads a kv head)`` on the configuration's device."""
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float32, device=config.device)
    if found.shape != (config.num_heads,):
        raise ValueError(f"{name}: shape {tuple(found.shape)} found; give one for each head, {config.num_heads} in all")
    return found.view(config.num_kv_heads, -1)


def check_host(attn_type: AttentionType, metadata: AttentionMetadata) -> None:
    """Raise TypeError for what is no metadata, ValueError where it lacks a field that ``attn_type`` reads."""
    host = getattr(metadata, "host", None)
    if host is None:
        raise TypeError(f"metadata: {type(metadata).__name__} found, without host arrays; give a builder's")
    for name in HOST_FIELDS[attn_type]:
        if getattr(host, name, None) is None:
            raise ValueError(f"metadata: it has no {name}, which attention of type {attn_type} reads")


def check_device(attn_type: AttentionType, metadata: AttentionMetadata, device: torch.device) -> None:
    """Raise ValueError where a field that ``attn_type`` reads on the device does not lie on the query's."""
    for name in DEVICE_FIELDS.get(attn_type, ()):
        array = getattr(metadata, name, None)
        if not isinstance(array, Tensor) or array.device != device:
            where = f"on {array.device}" if isinstance(array, Tensor) else f"a {type(array).__name__}"
            raise ValueError(f"metadata: {name} is {where}; build it for this backend, on {device}")


def check_query(query: Any, num_tokens: int) -> None:
    """Raise ValueError unless the query is a tensor of three dimensions and as many tokens as the metadata has."""
    if isinstance(query, Tensor):
        check_strided("query", query)  # first: a nested tensor has no shape
    if not isinstance(query, Tensor) or query.dim() != 3 or len(query) < num_tokens:
        raise ValueError(
            f"query: {_shape_or_type(query)} found; the metadata has {counted(num_tokens, 'token')}; give a tensor "
            "(tokens, query "
            "heads, head size)"
        )


def _shape_or_type(found: Any) -> str:
    """A tensor's shape; of anything else its type: an array's text would be a screenful."""
    if isinstance(found, Tensor):
        return f"shape {tuple(found.shape)}"
    return "None" if found is None else type_name(found)


def check_tensors(
    config: BackendConfig,
    attn_type: AttentionType,
    tensors: tuple[Any, Any, Any],
    num_tokens: tuple[int, int | None],
    output: Tensor | None,
    key_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, after comparing them, and ``output``, with the configuration.

    ``num_tokens`` are those that the metadata has, of queries and of keys (None: as many as the query's). A value that
    is part of the keys, and keys of which there are none, are made here. ``key_dtype`` is the dtype of key and value
    where it is not the model's: of those that were read in an fp8 cache.
    """
    query, key, value = tensors
    size_v = config.head_size_v or config.head_size
    check_query(query, num_tokens[0])
    for name, tensor in (("key", key), ("value", value), ("output", output)):
        if isinstance(tensor, Tensor):
            check_strided(name, tensor)
    if num_tokens[1] == 0 and key is None and value is None:
        key = query.new_empty((0, config.num_kv_heads, config.head_size))
        value = query.new_empty((0, config.num_kv_heads, size_v))
    elif config.use_mla and isinstance(key, Tensor) and key.dim():
        value = key[..., :size_v]
    num_keys = len(query) if num_tokens[1] is None else num_tokens[1]
    if num_tokens[1] is not None and isinstance(key, Tensor):
        num_keys = len(key) if key.dim() else 0
    if num_tokens[1] is not None and num_keys < num_tokens[1]:
        raise ValueError(
            f"key: {counted(num_keys, 'token')} found; the metadata has {counted(num_tokens[1], 'encoder token')} in "
            "this step"
        )
    expected = {
        "query": (query, (len(query), config.num_heads, config.head_size)),
        "key": (key, (num_keys, config.num_kv_heads, config.head_size)),
        "value": (value, (num_keys, config.num_kv_heads, size_v)),
    }
    if output is not None:
        expected["output"] = (output, (len(query), config.num_heads, size_v))
    for name, (tensor, shape) in expected.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name}: {_shape_or_type(tensor)} found; attention of type {attn_type} needs a tensor of shape {shape}"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} found; the query's tokens and the configuration say {shape}"
            )
        of_keys = key_dtype is not None and name in ("key", "value")
        if tensor.dtype != (key_dtype if of_keys else getattr(torch, config.dtype)):
            raise ValueError(f"{name}: {tensor.dtype} found; the backend was made for torch.{config.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name}: on {tensor.device}, but the query is on {query.device}")
    if output is not None:
        check_written("output", output)
    return query, key, value


def check_cache(
    config: BackendConfig, kv_cache: Any, name: str, slots: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Key cache and value cache; None where none is given and, ``slots`` (of ``name``) all being -1, none is needed."""
    for part in kv_cache if isinstance(kv_cache, (tuple, list)) else (kv_cache,):
        if isinstance(part, Tensor):
            check_strided("kv_cache", part)
    if kv_cache is None or (isinstance(kv_cache, Tensor) and kv_cache.numel() == 0):
        if np.max(slots, initial=-1) >= 0:
            raise ValueError(f"kv_cache: none given, but {name} has slots to write; only a profiling run needs none")
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
    block, num_blocks = int(np.max(slots, initial=-1)) // config.block_size, min(map(len, caches))
    if block >= num_blocks:
        raise ValueError(
            f"kv_cache: {counted(num_blocks, 'block')} found; {name} has a slot in block {block}: tell the batch "
            "num_blocks, "
            "or give the cache more"
        )
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
            "give the "
            "cache and the block pool the same num_blocks"
        )


def check_shared(requests: CausalRows, sliding_window: int | None, alibi_slopes: object) -> None:
    """Raise ValueError where ranks share a request's keys, and the layer counts distances among them."""
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
