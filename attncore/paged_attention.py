"""Attention over a paged cache, in torch and float32: the arithmetic of the ``reference`` backend.

Two routes give the same numbers: ``fused`` is torch's scaled_dot_product_attention, for what it can say (scale,
causality, window); ``explicit`` writes the scores out, for soft caps, ALiBi and sinks. Both see keys only through
positions: a key at a later position than the query, or ``sliding_window`` or more positions before it, is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attncore import kv_cache as paged

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Elements of one temporary (gathered keys, scores, mask) on a CPU: 2 MiB in float32, what its caches hold; and on
#: other devices, where every chunk costs a launch of each operation.
CPU_ELEMENTS = 1 << 19
DEVICE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Scoring:
    """How scores are made. Slopes and sinks are float32 ``(num_kv_heads, heads a kv head)``, on the device."""

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.logits_soft_cap is None and self.alibi_slopes is None and self.sinks is None

    def first_visible(self, position: int) -> int:
        """The first key position that a query at ``position`` may see."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)


class Paged(NamedTuple):
    """What a step's attention reads: its tensors ``(num_tokens, heads, head_size)``, the caches, the block table."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor  # int32 (rows, width), on the device

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``slots``, float32. On a CPU a block id outside the cache is a ValueError."""
        if slots.device.type == "cpu" and slots.numel():  # elsewhere looking would wait for the device
            low, high = (int(bound) for bound in slots.aminmax())
            block_size = self.key_cache.shape[1]
            usable = (self.key_cache.shape[0] - 1) * block_size
            if low < 0 or high >= usable:
                block = (low if low < 0 else high) // block_size
                raise ValueError(
                    f"metadata: the block table names block {block}, but the cache holds "
                    f"{usable // block_size} blocks; give the cache and the block pool the same num_blocks"
                )
        return paged.read(self.key_cache, slots).float(), paged.read(self.value_cache, slots).float()

    @property
    def temporary_elements(self) -> int:
        """How many elements a temporary may have on this device."""
        return CPU_ELEMENTS if self.query.device.type == "cpu" else DEVICE_ELEMENTS

    def fresh(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """This step's keys and values of tokens ``start:end``, float32, rounded as the cache rounds them."""
        return (
            self.key[start:end].to(self.key_cache.dtype).float(),
            self.value[start:end].to(self.value_cache.dtype).float(),
        )


def one_request(step: Paged, scoring: Scoring, output: Tensor, *, row: int, start: int, end: int, context: int) -> None:
    """Attention of tokens ``start:end``, which follow ``context`` cached tokens of table row ``row``, into ``output``.

    Context is read from the cache, no further back than a window reaches; the step's own keys are taken as they came,
    so that a prompt whose early slots are masked, or that has no table at all, is right too. Queries go in chunks of
    bounded temporaries.
    """
    first = scoring.first_visible(context)
    key, value = step.fresh(start, end)
    if first < context:
        position = torch.arange(first, context, device=key.device)
        cached_key, cached_value = step.gather(_slots(step.block_table[row], position, step.key_cache.shape[1]))
        key, value = torch.cat((cached_key, key)), torch.cat((cached_value, value))
    num_tokens, num_heads = end - start, step.query.shape[1]
    copies = num_heads // key.shape[1] if scoring.plain else num_heads  # of the mask, or of the scores
    chunk = max(1, step.temporary_elements // (copies * len(key)))
    for i in range(0, num_tokens, chunk):
        j = min(i + chunk, num_tokens)
        low, high = max(first, scoring.first_visible(context + i)), context + j
        seen = slice(low - first, high - first)
        output[start + i : start + j] = attend(
            step.query[start + i : start + j].float().unsqueeze(0),
            key[seen].unsqueeze(0),
            value[seen].unsqueeze(0),
            torch.arange(context + i, context + j, device=key.device).unsqueeze(0),
            torch.arange(low, high, device=key.device).unsqueeze(0),
            scoring,
        )[0]


def many_requests(
    step: Paged,
    scoring: Scoring,
    output: Tensor,
    *,
    rows: NDArray[np.int64],
    starts: NDArray[np.int64],
    contexts: NDArray[np.int64],
    num_queries: int,
) -> None:
    """Attention of requests that each have ``num_queries`` tokens this step, few and cached, into ``output``.

    Request i is block-table row ``rows[i]``; its tokens begin at ``starts[i]`` and follow ``contexts[i]`` cached
    ones. Requests of like length share a chunk; a position past a request's context repeats its last token, so that
    every slot read is a written one of its own.
    """
    first = np.zeros_like(contexts)
    if scoring.sliding_window is not None:
        first = np.maximum(first, contexts - scoring.sliding_window + 1)
    lengths = contexts + num_queries - first
    order = np.argsort(lengths, kind="stable")
    token_elements = step.key.shape[1] * step.key.shape[2]
    if not scoring.plain:
        token_elements = max(token_elements, step.query.shape[1] * num_queries)
    done = 0
    while done < len(order):
        # Lengths rise, so a chunk's last request sets its width: its size is count times that.
        sizes = lengths[order[done:]] * np.arange(1, len(order) - done + 1) * token_elements
        count = max(1, int(np.searchsorted(sizes, step.temporary_elements, side="right")))
        chosen = order[done : done + count]
        done += count
        packed = torch.from_numpy(np.stack((rows[chosen], starts[chosen], contexts[chosen], first[chosen])))
        # A live table is as wide as the longest request that may ever come: take the columns in use.
        columns = -(-int(contexts[chosen].max() + num_queries) // step.key_cache.shape[1])
        used = step._replace(block_table=step.block_table[:, :columns])
        _batch(used, scoring, output, packed, int(lengths[chosen[-1]]), num_queries)


def _batch(step: Paged, scoring: Scoring, output: Tensor, packed: Tensor, width: int, num_queries: int) -> None:
    device = step.query.device
    rows, starts, contexts, first = packed.to(device, non_blocking=True).unsqueeze(2).unbind()
    ahead = torch.arange(num_queries, device=device)
    key_position = first + torch.arange(width, device=device)
    table = step.block_table[rows.squeeze(1)]
    readable = torch.where(key_position < contexts, key_position, contexts + num_queries - 1)
    key, value = step.gather(_slots(table, readable, step.key_cache.shape[1]))
    tokens = starts + ahead
    query_position = contexts + ahead
    if num_queries > 1:  # the step's own keys are taken as they came: a window may have masked the slots of some
        line = torch.arange(len(rows), device=device).unsqueeze(1)
        key[line, query_position - first] = step.key[tokens].to(step.key_cache.dtype).float()
        value[line, query_position - first] = step.value[tokens].to(step.value_cache.dtype).float()
    result = attend(step.query[tokens].float(), key, value, query_position, key_position, scoring)
    output[tokens] = result.to(output.dtype)


def _slots(block_table: Tensor, position: Tensor, block_size: int) -> Tensor:
    """Slots of ``position`` (int64) in the rows of ``block_table``; both have the same leading dimensions."""
    block = block_table.gather(-1, torch.div(position, block_size, rounding_mode="floor"))
    return block.long() * block_size + torch.remainder(position, block_size)


def attend(
    query: Tensor, key: Tensor, value: Tensor, query_position: Tensor, key_position: Tensor, scoring: Scoring
) -> Tensor:
    """Attention of ``query`` (b, q, heads, d) over ``key`` and ``value`` (b, k, kv heads, d).

    Positions are int64, (b, q) and (b, k); the rest is float32, the result (b, q, heads, d). Every query has to see
    at least one key.
    """
    distance = query_position.unsqueeze(2) - key_position.unsqueeze(1)
    hidden = distance < 0
    if scoring.sliding_window is not None:
        hidden |= distance >= scoring.sliding_window
    return (fused if scoring.plain else explicit)(query, key, value, distance, hidden, scoring)


def fused(query: Tensor, key: Tensor, value: Tensor, distance: Tensor, hidden: Tensor, scoring: Scoring) -> Tensor:
    """``attend`` by torch's scaled_dot_product_attention."""
    group = query.shape[2] // key.shape[2]
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, -torch.inf)
    result = scaled_dot_product_attention(
        _fold(query, key.shape[2]),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask.repeat(1, group, 1).unsqueeze(1),
        scale=scoring.scale,
    )
    return _unfold(result, group)


def explicit(query: Tensor, key: Tensor, value: Tensor, distance: Tensor, hidden: Tensor, scoring: Scoring) -> Tensor:
    """``attend`` with the scores written out: scale, soft cap, ALiBi, mask, softmax with sinks."""
    group = query.shape[2] // key.shape[2]
    score = _fold(query, key.shape[2]) * scoring.scale @ key.permute(0, 2, 3, 1)
    score = score.view(*score.shape[:2], group, *distance.shape[1:])  # (b, kv heads, heads a kv head, q, k)
    if scoring.logits_soft_cap is not None:
        score = score.div_(scoring.logits_soft_cap).tanh_().mul_(scoring.logits_soft_cap)
    if scoring.alibi_slopes is not None:
        score -= scoring.alibi_slopes[None, :, :, None, None] * distance[:, None, None]
    score.masked_fill_(hidden[:, None, None], -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks[None, :, :, None, None].expand(*score.shape[:-1], 1)
        weight = torch.cat((score, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weight = score.softmax(dim=-1)
    return _unfold(weight.flatten(2, 3) @ value.transpose(1, 2), group)


def _fold(query: Tensor, num_kv_heads: int) -> Tensor:
    """(b, q, heads, d) as (b, kv heads, heads a kv head * q, d): the heads that share keys become further queries."""
    batch, num_queries, num_heads, head_size = query.shape
    parted = query.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    return parted.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(result: Tensor, group: int) -> Tensor:
    """The inverse of ``_fold``."""
    batch, num_kv_heads, rows, head_size = result.shape
    parted = result.reshape(batch, num_kv_heads, group, rows // group, head_size)
    return parted.permute(0, 3, 1, 2, 4).flatten(2, 3)
