"""A step's parts, called one after another and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    if not with_lse:
        calls = [layer.bound(part, layer.arguments(part, rows), caches) for part, rows in parts]
        return joined(layer, calls, parts, query, fresh), None
    if len(parts) == 1:
        return one_part(layer, query, fresh, caches, *parts[0], positions)
    output, lse = query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)
    for part, rows in parts:
        more, more_lse = one_part(layer, query, fresh, caches, part, rows, positions)
        mine = slice(part.start, part.stop)
        output[mine] = more if part.entry == "decode" else more[mine]
        lse[mine] = more_lse if part.entry == "decode" else more_lse[mine]
    return output, lse


def joined(
    layer: Layer, calls: Sequence[Callable[..., Any]], parts: Sequence[tuple[Part, Rows]], query: Tensor,
    fresh: tuple[Any, Any],
) -> Tensor:  # fmt: skip
    """The output of all ``parts``, each by its call; a part of whole tokens is filled up with the others."""
    output: Tensor | None = None
    for call, (part, _) in zip(calls, parts, strict=True):
        more = _found(layer, call, part, query, fresh)
        if layer.pairs:
            more = more[0]
        whole = part.entry != "decode"
        if not whole and layer.by_row:
            more = more.squeeze(1) if part.query_len == 1 else more.flatten(0, 1)
        if output is None and (whole or len(parts) == 1):
            output = more
            continue
        if output is None:
            output = query.new_empty(query.shape)
        output[part.start : part.stop] = more[part.start : part.stop] if whole else more
    if output is None:
        raise ValueError("metadata: a step of no rows")
    return output


def one_part(
    layer: Layer, query: Tensor, fresh: tuple[Any, Any], caches: Caches | None, part: Part, rows: Rows, positions: Any
) -> tuple[Tensor, Tensor]:
    """A part's output and log-sum-exp: of its own tokens for ``decode``, else of all of the query's."""
    call = layer.bound(part, layer.arguments(part, rows, True), caches)
    found = _found(layer, call, part, query, fresh)
    capacity = rows.table.shape[1] * caches[0].shape[1] if caches is not None else 0
    return layer.answer(found, part, capacity, positions)


def _found(layer: Layer, call: Callable[..., Any], part: Part, query: Tensor, fresh: tuple[Any, Any]) -> Any:
    """What the library returns for a part."""
    if part.entry == "packed":
        return call(query, *fresh)
    if part.entry == "paged":
        return call(query)
    if query.shape[0] != part.stop - part.start:
        query = query[part.start : part.stop]
    if not layer.by_row:
        return call(query)
    if part.query_len == 1:
        return call(query.unsqueeze(1))
    return call(query.view(part.last - part.first, part.query_len, *query.shape[1:]))


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
