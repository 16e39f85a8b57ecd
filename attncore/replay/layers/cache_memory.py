"""What the caches and the states of a model take, counted before memory is taken for them."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attncore.integrations.transformers.recurrent_layers import nbytes_of_states
from attncore.registry.host.free_memory import available_bytes
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.integrations.transformers.model_layers import ModelLayer
    from attncore.replay.settings import Settings

MOST = 0.75
"""The part of the free memory that they may take, where a request's tensors do not take more than the rest."""


def check_cache_memory(
    model: Any, backend: AttentionBackend, layers: tuple[ModelLayer, ...], settings: Settings, beside: int
) -> None:
    """ValueError, which begins with ``num_blocks``, where the caches of ``layers``, and the model's states, take more
    than MOST of what is free, or than is left ``beside`` the bytes that its longest request takes.

    A system that gives memory which it has not got ends the process later, without a word.
    """
    taken = _bytes_of_cache(backend, settings.num_blocks) * _number_of_caches(layers)
    if settings.keeps_states:
        taken += nbytes_of_states(model) * (settings.max_num_seqs + 1)  # and the null slot
    free = available_bytes(backend.config.device)
    if taken > min(MOST * free, free - beside):
        left = f"{free / 2**30:.1f} GiB are free"
        if beside > free * (1 - MOST):
            left = f"{max(free - beside, 0) / 2**30:.1f} GiB are free beside the tensors of a step"
        raise no_memory(layers, settings, f"they take {taken / 2**30:.1f} GiB, and {left}")


def no_memory(layers: tuple[ModelLayer, ...], settings: Settings, why: str) -> ValueError:
    """The error of caches, and states, that do not fit."""
    slots = f", and for the states of {counted(settings.max_num_seqs, 'request')}" if settings.keeps_states else ""
    return ValueError(
        f"num_blocks: no memory for {counted(_number_of_caches(layers), 'cache')} of "
        f"{counted(settings.num_blocks, 'block')} of {settings.block_size}{slots} ({why}); pass a smaller --num-blocks"
        f"{' or --max-num-seqs' if slots else ''}"
    )


def _number_of_caches(layers: tuple[ModelLayer, ...]) -> int:
    """Layers that have a cache of their own."""
    return sum(layer.reads_cache_of is None for layer in layers)


def _bytes_of_cache(backend: AttentionBackend, num_blocks: int) -> int:
    """Of one layer; 0 where its shape is none, which is said when it is allocated."""
    config = backend.config
    with suppress(TypeError, ValueError):
        shape = backend.kv_cache_shape(num_blocks, config.block_size, config.num_kv_heads, config.head_size)
        return int(math.prod(map(int, shape)) * backend.kv_cache_torch_dtype().itemsize)
    return 0
