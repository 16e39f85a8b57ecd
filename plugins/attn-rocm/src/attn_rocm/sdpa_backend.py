"""The variant ``sdpa``: torch's scaled_dot_product_attention, request by request, where there is no Triton."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_rocm.base import RocmBackend, RocmImpl, check_given
from attncore import AttentionMetadata


class SdpaImpl(RocmImpl):
    """One layer. Lengths come from the host, keys of a request's context are gathered from its blocks."""

    def forward(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> Tensor:
        """See ``attncore.AttentionImpl.forward``. Tokens behind the last request get zeros."""
        if write is not True:
            write = self.check_write(write)
        output = self.checked(query, key, value, kv_cache, metadata, output)
        caches = None
        if kv_cache is not None:
            caches = self.written(key, value, kv_cache, metadata.slot_mapping, write=write)
        # Where a request's tokens start is one array, how many keys it has another: the two are not mixed up.
        starts, lengths = metadata.host.query_start_loc.tolist(), metadata.host.seq_lens.tolist()
        slots = metadata.host.slot_mapping
        tables = not metadata.from_groups and metadata.block_table.shape[1] > 0  # in each row
        prompts = metadata.num_prefills if metadata.from_groups else 0
        output[starts[-1] :] = 0
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            if start == end:  # padding of a captured size
                continue
            context = lengths[row] - (end - start)
            low = 0 if self.sliding_window is None else max(0, context - self.sliding_window + 1)
            parts, paged = [], caches is not None and (tables or slots[end - 1] >= 0)
            # Whether this step's own keys are read, and not the cache's: prompts of the list builder have no table, or
            # tokens that their window left out.
            own = write or not paged or (row < prompts and not (context and (slots[start:end] >= 0).all()))
            high = context if own else lengths[row]
            if caches is not None and paged and low < high:
                positions = torch.arange(low, high, device=query.device)
                gathered = [self._gather(cache, metadata.block_table[row], positions, query) for cache in caches]
                parts.append((_times(gathered[0], self.k_scale), _times(gathered[1], self.v_scale)))
            if own:
                check_given(key, value)
                parts.append((key[start:end], value[start:end]))
            keys, values = (torch.cat(of_both) for of_both in zip(*parts, strict=True))
            output[start:end] = self._attend(query[start:end], keys, values)
        return output

    def _gather(self, cache: Tensor, table: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """Keys or values (positions, kv heads, size) of a request, in the dtype of ``like``; scales are left out."""
        size = self.backend.config.block_size
        blocks = table[torch.div(positions, size, rounding_mode="floor")].long()
        if cache.element_size() == 1:  # torch indexes no fp8
            return cache.view(torch.uint8)[blocks, positions % size].view(cache.dtype).to(like.dtype)
        return cache[blocks, positions % size].to(like.dtype)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last ``len(query)`` tokens of a sequence over ``key`` and ``value``, which end with it."""
        group = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (key, value))
        position = torch.arange(key.shape[1], device=query.device)
        distance = position[-len(query) :, None] - position
        hidden = distance < 0
        if self.sliding_window is not None:
            hidden = hidden | (distance >= self.sliding_window)
        bias = torch.zeros(distance.shape, dtype=query.dtype, device=query.device)
        if self.slopes is not None:  # in 16 bits biases of far keys would differ by whole units from what they are
            bias = -self.slopes[:, None, None] * distance
        bias = bias.masked_fill(hidden, float("-inf"))
        query, key, value = (tensor.to(bias.dtype) for tensor in (query.transpose(0, 1), key, value))
        with torch.autocast(query.device.type, enabled=False):  # which would round the tensors of a float32 model
            return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale).transpose(0, 1)


def _times(tokens: Tensor, scale: float | Tensor) -> Tensor:
    """``tokens`` (positions, kv heads, size) times one scale, or each head's; in the same dtype."""
    if isinstance(scale, float):
        return tokens * scale
    return (tokens * scale.view(-1, 1)).to(tokens.dtype)


class SdpaBackend(RocmBackend):
    """The variant ``sdpa``."""

    impl_class = SdpaImpl
