"""Which elements of a block belong to which of its tokens, found by writing prompts to a small cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.builder import InputBatch, MetadataBuilder
from attncore.testing.engines.blocks_first import as_integers, block_views
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

WHERE = "are slots written as block * block_size + offset?"
ALIKE = (
    "a token whose key and value are all 1 and one whose are all 2 look alike there, and count as the first. A cache "
    "that keeps tokens scaled by a number of their own (int8, int4) is outside the contract; of 8 bits it has fp8 alone"
)
_known: dict[int, list[Tensor]] = {}  # by id(backend), as long as the backend lives: it need not be hashable


def slot_owners(backend: AttentionBackend) -> list[Tensor]:
    """For each tensor of the cache, int64 of a block's shape: the offset of the token that owns an element, -1: none.

    Found by writing a whole block of ones, then once for each bit of the offset with twos where the bit is set: both
    numbers are exact in every dtype of a cache. Found once for each backend.
    """
    if id(backend) in _known:
        return _known[id(backend)]
    size = backend.config.block_size
    offsets = torch.arange(size)
    base = _written(backend, torch.ones(size))
    owners = [torch.where(part != 0, 0, -1) for part in base]
    for bit in range((size - 1).bit_length()):
        image = _written(backend, 1.0 + (offsets >> bit & 1))
        for found, part, ones in zip(owners, image, base, strict=True):
            found[(part != ones) & (found >= 0)] += 1 << bit
    for found in owners:
        counts = torch.bincount(found[found >= 0].flatten(), minlength=size).tolist()
        if len(counts) != size or len(set(counts)) != 1:
            raise ConformanceError(
                f"a prompt of exactly one block left elements for the tokens of its block, {counts} of them; every "
                f"token must own as many: {ALIKE if counts[0] > max(counts[1:], default=0) else WHERE}"
            )
    if not any((found >= 0).any() for found in owners):
        raise ConformanceError("a prompt of exactly one block wrote nothing to its block: forward must write the cache")
    _known[id(backend)] = owners
    weakref.finalize(backend, _known.pop, id(backend), None)
    return owners


def _written(backend: AttentionBackend, numbers: Tensor) -> list[Tensor]:
    """The bits of block 1, for each part, after a prompt whose token i has keys and values of ``numbers[i]``."""
    num_blocks = 2
    kv_cache = backend.allocate_kv_cache(num_blocks)
    before = [as_integers(part).clone() for part in block_views(backend, kv_cache, num_blocks)]
    _prefill(backend, kv_cache, [1], numbers)
    after = [as_integers(part) for part in block_views(backend, kv_cache, num_blocks)]
    for old, new in zip(before, after, strict=True):
        if not torch.equal(old[0], new[0]):
            raise ConformanceError("a prompt whose only block is 1 changed block 0, which it does not own")
    return [part[1].cpu() for part in after]


def _prefill(backend: AttentionBackend, kv_cache: Any, block_ids: list[int], numbers: Tensor) -> None:
    """Run one prompt, whose token i has keys and values of ``numbers[i]`` and queries of ones.

    A backend that only decodes gets it token by token.
    """
    config = backend.config
    dtype, length = getattr(torch, config.dtype), len(numbers)
    impl = backend.impl("slot owners", scale=config.head_size**-0.5)
    batch = InputBatch(max_num_reqs=1, max_model_len=length, block_size=config.block_size)
    builder = MetadataBuilder(batch, max_num_batched_tokens=length)
    batch.add_request("a", block_ids)
    has_prefill = config.spec is None or "prefill" in config.spec.phases
    shapes = (
        (config.num_heads, config.head_size),
        (config.num_kv_heads, config.head_size),
        (config.num_kv_heads, config.head_size_v or config.head_size),
    )
    for chunk in (numbers,) if has_prefill else numbers[:, None]:
        metadata = planned(backend, builder.build({"a": len(chunk)}))
        part = chunk.view(-1, 1, 1)
        query, key, value = (
            source.expand(len(chunk), *shape).contiguous().to(config.device, dtype)
            for source, shape in zip((torch.ones_like(part), part, part), shapes, strict=True)
        )
        impl.forward(query, key, None if config.use_mla else value, kv_cache, metadata)
