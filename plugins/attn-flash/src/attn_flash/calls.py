"""A step's parts, called one after another and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_flash import generation2, generation4
from attn_flash.parts import Part
from attn_flash.rows import Rows

Layer = generation2.Layer | generation4.Layer
Caches = tuple[Tensor, Tensor]
Answer = tuple[Tensor, Tensor | None]


def attended(
    layer: Layer, query: Tensor, fresh: tuple[Any, Any], caches: Caches | None, parts: Sequence[tuple[Part, Rows]],
    positions: Any, with_lse: bool,
) -> Answer:  # fmt: skip
    """The rows of all ``parts``: the library's own tensors where there is one part, of as many tokens as it has; else
    all of the query's. ``fresh``: this step's keys and values. What belongs to no part may hold anything.
    """
    if len(parts) == 1:
        return one_part(layer, query, fresh, caches, *parts[0], positions, with_lse)
    output = lse = None
    for part, rows in parts:
        more, more_lse = one_part(layer, query, fresh, caches, part, rows, positions, with_lse)
        if output is None and part.entry != "decode":
            output, lse = more, more_lse
            continue
        if output is None:
            output = query.new_empty(query.shape)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if with_lse else None
        mine = slice(part.start, part.stop)
        output[mine] = more if part.entry == "decode" else more[mine]
        if lse is not None and more_lse is not None:
            lse[mine] = more_lse if part.entry == "decode" else more_lse[mine]
    if output is None:
        raise ValueError("metadata: a step of no rows")
    return output, lse


def one_part(
    layer: Layer, query: Tensor, fresh: tuple[Any, Any], caches: Caches | None, part: Part, rows: Rows, positions: Any,
    with_lse: bool,
) -> Answer:  # fmt: skip
    """A part's answer: of its own tokens for ``decode``, else of all of the query's."""
    call = layer.bound(part, rows, caches, with_lse)
    if part.entry == "packed":
        found = call(query, *fresh)
    elif part.entry == "paged":
        found = call(query)
    else:
        mine = query if len(query) == part.stop - part.start else query[part.start : part.stop]
        found = call(mine.view(part.last - part.first, part.query_len, *mine.shape[1:]) if layer.by_row else mine)
    if with_lse:
        capacity = rows.table.shape[1] * caches[0].shape[1] if caches is not None else 0
        return layer.answer(found, part, capacity, positions)
    output: Tensor = found[0] if layer.pairs else found
    return (output.flatten(0, 1) if output.dim() == 4 else output), None


def finished(found: Tensor, count: int, num_tokens: int, output: Tensor | None, fill: float = 0.0) -> Tensor:
    """``found``, of ``num_tokens`` good rows, with ``count`` rows: those beyond them are ``fill``. In ``output`` where
    that is given.
    """
    if output is None:
        if len(found) == count:
            if count > num_tokens:
                found[num_tokens:] = fill
            return found
        output = found.new_empty((count, *found.shape[1:]))
    output[:num_tokens] = found[:num_tokens]
    if count > num_tokens:
        output[num_tokens:] = fill
    return output
