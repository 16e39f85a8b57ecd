"""A step's parts, called one after another and joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_flash import generation2, generation4
from attn_flash.parts import Part
from attn_flash.rows import rows_of

Layer = generation2.Layer | generation4.Layer
Caches = tuple[Tensor, Tensor]
Answer = tuple[Tensor, Tensor | None]


def attended(
    layer: Layer, query: Tensor, fresh: tuple[Any, Any], caches: Caches | None, metadata: Any, parts: tuple[Part, ...],
    positions: Any, with_lse: bool, *, cross: bool = False,
) -> Answer:  # fmt: skip
    """The rows of all ``parts``: the library's own tensors where there is one part, of as many tokens as it has; else
    all of the query's. ``fresh``: this step's keys and values. What belongs to no part may hold anything.
    """
    answers = [
        (part, _called(layer, query, fresh, caches, metadata, part, positions, with_lse, cross)) for part in parts
    ]
    (first, (output, lse)), *others = answers
    if not others:
        return output, lse
    if first.entry == "decode":
        whole = query.new_empty(query.shape)
        whole[first.start : first.stop] = output
        output = whole
        if lse is not None:
            every = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            every[first.start : first.stop] = lse
            lse = every
    for part, (more, more_lse) in others:
        mine = slice(part.start, part.stop)
        output[mine] = more if part.entry == "decode" else more[mine]
        if lse is not None and more_lse is not None:
            lse[mine] = more_lse if part.entry == "decode" else more_lse[mine]
    return output, lse


def _called(
    layer: Layer, query: Tensor, fresh: tuple[Any, Any], caches: Caches | None, metadata: Any, part: Part,
    positions: Any, with_lse: bool, cross: bool,
) -> Answer:  # fmt: skip
    if part.entry == "packed":
        key, value = fresh
        rows = rows_of(metadata, part, None, cross=cross)
        return layer.packed(query, key, value, rows.starts, rows.fresh, part, positions, with_lse)
    if caches is None:
        raise ValueError("kv_cache: None found; a step of requests that have context, or decodes, needs the cache")
    columns = None
    if layer.splits_by_width and part.entry == "decode" and not metadata.use_cuda_graph:
        columns = -(-part.max_seq_len // caches[0].shape[1]) or 1
    rows = rows_of(metadata, part, columns, cross=cross)
    if part.entry == "paged":
        return layer.paged(query, caches, rows, part, positions, with_lse)
    tokens = part.stop - part.start
    mine = query if len(query) == tokens else query[part.start : part.stop]
    by_row = mine.view(part.last - part.first, part.query_len, *mine.shape[1:])
    return layer.decode(by_row, caches, rows, part, positions, with_lse)


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
