"""Tensors as engines pass them: parts of larger ones, contiguous in the last dimension only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attncore.builder import CommonAttentionMetadata
from attncore.testing.engines.compare import differs
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError
from attncore.testing.harness.subject import Subject

__all__ = ["test_strided_tensors"]
GAP = 16  # elements between heads: as wide as the loads that a kernel may align to
BETWEEN = 3.0  # what lies between heads


@covers("strided tensors")
@pytest.mark.parametrize("layout", ["fused", "gaps"])
def test_strided_tensors(attncore_subject: Subject, layout: str) -> None:
    """``query``, ``key`` and ``value`` are slices of one fused tensor, or have gaps between their heads; ``output``
    has gaps between its tokens, or its heads, which stay as they are.
    """
    backend = attncore_subject.backend()
    engine, config = Engine(backend), backend.config
    forward = engine.impl.forward

    def strided(
        query: Tensor, key: Tensor, value: Tensor | None, kv_cache: Any, metadata: CommonAttentionMetadata
    ) -> Tensor:
        parts = {"query": query, "key": key, **({} if value is None else {"value": value})}
        given = fused(*parts.values()) if layout == "fused" else [gapped(part) for part in parts.values()]
        blank = query.new_full((*query.shape[:2], config.head_size_v or config.head_size), BETWEEN)
        output = fused(blank, key)[0] if layout == "fused" else gapped(blank)
        whole = _storage(output)
        before = whole.clone()
        answer = forward(given[0], given[1], None if value is None else given[2], kv_cache, metadata, output)
        if answer.data_ptr() != output.data_ptr() or answer.stride() != output.stride():
            raise ConformanceError(
                "forward was given a strided output and returned another tensor: it ignores its argument output, or "
                "that it is strided"
            )
        result = output.clone()
        output.copy_(blank)
        if differs(whole.cpu(), before.cpu()):
            raise ConformanceError("forward wrote beside its strided output: it ignores the strides")
        for (name, original), tensor in zip(parts.items(), given, strict=True):
            if differs(tensor.cpu(), original.cpu()):
                raise ConformanceError(f"forward changed its strided argument {name}")
        return result

    engine.impl.forward = strided  # type: ignore[method-assign, assignment]
    try:
        run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))
    except ConformanceError as error:
        raise ConformanceError(
            f"with strided tensors ({layout}; contiguous in the last dimension only): {error}"
        ) from error


def fused(*parts: Tensor) -> list[Tensor]:
    """Copies of tensors (T, heads, size) as slices of one tensor (T, the sum of heads * size)."""
    whole = torch.cat([part.flatten(1) for part in parts], dim=1)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.shape[1] * part.shape[2])
    slices = [whole[:, start:end] for start, end in pairwise(ends)]
    return [piece.view(part.shape) for piece, part in zip(slices, parts, strict=True)]


def gapped(part: Tensor) -> Tensor:
    """A copy of a tensor (T, heads, size) with ``GAP`` elements between its heads."""
    tokens, heads, size = part.shape
    found = part.new_full((tokens, heads, size + GAP), BETWEEN)[:, :, :size]
    found.copy_(part)
    return found


def _storage(part: Tensor) -> Tensor:
    """All of the memory that a tensor is a part of."""
    return torch.as_strided(part, (part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)
