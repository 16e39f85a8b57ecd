"""What a layer is given in a step, compared with its backend's configuration; errors begin with the argument's name.

For ``reference`` and, by ``AttentionImpl.check_step``, for every backend that asks. Nothing here waits for a device: of
slots and lengths the host's are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attncore.ops.cross_rows import check_cross_rows
from attncore.ops.written_tensor import check_strided, check_written
from attncore.quoted import type_name
from attncore.show import counted
from attncore.vocabulary import AttentionType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attncore.abstract.attention_metadata import AttentionMetadata, HostArrays
    from attncore.abstract.backend_config import BackendConfig


class BackendOfStep(Protocol):
    """What is read of a layer's backend."""

    config: BackendConfig

    def kv_cache_views(self, kv_cache: Any) -> tuple[Tensor, Tensor]: ...


class LayerOfStep(Protocol):
    """What is read of a layer, an AttentionImpl."""

    attn_type: AttentionType

    @property
    def backend(self) -> BackendOfStep: ...


#: What each type of attention reads of the host's arrays.
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

#: What each type of attention reads on the device.
DEVICE_FIELDS = {
    AttentionType.DECODER: ("slot_mapping", "block_table"),
    AttentionType.ENCODER_DECODER: ("cross_slot_mapping", "cross_block_table"),
}


def check_host(attn_type: AttentionType, metadata: AttentionMetadata) -> None:
    """Raise TypeError for what is no metadata, ValueError where it lacks a field that ``attn_type`` reads."""
    host = getattr(metadata, "host", None)
    if host is None:
        raise TypeError(
            f"metadata: {type(metadata).__name__} found, without host arrays; give a builder's, behind kv_cache: "
            "forward(query, key, value, kv_cache, metadata)"
        )
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


def num_tokens_of(attn_type: AttentionType, host: HostArrays) -> tuple[int, int | None]:
    """Tokens that the metadata has: queries, and keys where those are others."""
    if attn_type is AttentionType.DECODER:
        return len(host.slot_mapping), None
    if attn_type is AttentionType.ENCODER:
        return int(host.encoder_query_start_loc[-1]), None
    queries = int(host.query_start_loc[-1])
    return queries, int(host.encoder_query_start_loc[-1]) if attn_type is AttentionType.ENCODER_DECODER else None


def check_query(query: Any, num_tokens: int) -> None:
    """Raise ValueError unless the query is a tensor of three dimensions and as many tokens as the metadata has."""
    if isinstance(query, Tensor):
        check_strided("query", query)  # first: a nested tensor has no shape
    if not isinstance(query, Tensor) or query.dim() != 3 or len(query) < num_tokens:
        raise ValueError(
            f"query: {_shape_or_type(query)} found; the metadata has {counted(num_tokens, 'token')}; give a tensor "
            "(tokens, query heads, head size)"
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


def has_no_cache(kv_cache: Any, name: str, slots: NDArray[np.int64]) -> bool:
    """Whether no cache is given; ValueError where ``slots``, of ``name``, are to be written all the same.

    ValueError, too, where parts of a cache are no strided tensors.
    """
    for part in kv_cache if isinstance(kv_cache, (tuple, list)) else (kv_cache,):
        if isinstance(part, Tensor):
            check_strided("kv_cache", part)
    if kv_cache is None or (isinstance(kv_cache, Tensor) and kv_cache.numel() == 0):
        if np.max(slots, initial=-1) >= 0:
            raise ValueError(f"kv_cache: none given, but {name} has slots to write; only a profiling run needs none")
        return True
    return False


def check_last_slot(config: BackendConfig, caches: tuple[Tensor, Tensor], name: str, slots: NDArray[np.int64]) -> None:
    """ValueError where one of the host's ``slots``, of ``name``, lies past the end of the caches."""
    block, num_blocks = int(np.max(slots, initial=-1)) // config.block_size, min(map(len, caches))
    if block >= num_blocks:
        raise ValueError(
            f"kv_cache: {counted(num_blocks, 'block')} found; {name} has a slot in block {block}: tell the batch "
            "num_blocks, or give the cache more"
        )


def check_step(
    layer: LayerOfStep,
    tensors: tuple[Any, Any, Any],
    kv_cache: Any,
    metadata: AttentionMetadata,
    output: Tensor | None,
    *,
    write: bool,
) -> None:
    """What ``AttentionImpl.check_step`` says, of a ``layer``; ``tensors`` are query, key and value."""
    config, attn_type = layer.backend.config, layer.attn_type
    check_host(attn_type, metadata)
    if attn_type is AttentionType.ENCODER_DECODER:
        check_cross_rows(metadata, len(metadata.host.encoder_query_start_loc) - 1)
    num_tokens = num_tokens_of(attn_type, metadata.host)
    check_query(tensors[0], num_tokens[0])
    query: Tensor = tensors[0]
    if not write and kv_cache is not None:  # keys are read in the cache: those that are given may be anything
        sizes = config.head_size, config.head_size_v or config.head_size
        count = len(query) if num_tokens[1] is None else num_tokens[1]
        key, value = (query.new_empty(()).expand(count, config.num_kv_heads, size) for size in sizes)
        tensors = query, key, value
    check_tensors(config, attn_type, tensors, num_tokens, output)
    if attn_type not in DEVICE_FIELDS:
        return
    name = DEVICE_FIELDS[attn_type][0]
    slots = np.asarray(getattr(metadata.host, name))
    check_device(attn_type, metadata, query.device)
    if has_no_cache(kv_cache, name, slots):
        return
    caches = layer.backend.kv_cache_views(kv_cache)
    for cache in caches:
        if cache.device != query.device:
            raise ValueError(f"kv_cache: on {cache.device}, but the query is on {query.device}")
    check_last_slot(config, caches, name, slots)
