"""Hands a layer tensors as engines pass them: parts of larger ones, contiguous in the last dimension only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from attncore.testing.engines.compare import differs
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionMetadata

AnyEngine = TypeVar("AnyEngine", bound=Engine)
LAYOUTS = ("fused", "gaps")
GAP = 16  # elements between heads: as wide as the loads that a kernel may align to
BETWEEN = 3.0  # what lies between heads


def with_strided_tensors(engine: AnyEngine, layout: str) -> AnyEngine:
    """The engine, every method of whose layer gets strided tensors from now on: slices of one tensor (``fused``), or
    with ``gaps`` between heads; ``output`` likewise. What they are a part of stays as it is, or ConformanceError.
    """
    config, impl = engine.config, engine.impl
    forward, forward_with_lse, write_cache = impl.forward, impl.forward_with_lse, impl.write_cache
    inside = False  # a method that calls another hands over what it likes

    def attending(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def attend(
            query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Any, metadata: AttentionMetadata,
            asked: Tensor | None = None, *, write: bool = True,
        ) -> Any:  # fmt: skip
            nonlocal inside
            if inside:
                return method(query, key, value, kv_cache, metadata, asked, write=write)
            parts, given = _strided({"query": query, "key": key, "value": value}, layout)
            blank = query.new_full((*query.shape[:2], config.head_size_v or config.head_size), BETWEEN)
            (output,) = fused(blank) if layout == "fused" else [gapped(blank)]
            whole = _storage(output)
            before = whole.clone()
            # without the argument where it says nothing: an engine's plain call
            reading = {} if write else {"write": False}
            inside = True
            try:
                answer = method(*_three(given), kv_cache, metadata, output, **reading)
            finally:
                inside = False
            filled, *lse = answer if isinstance(answer, tuple) else (answer,)
            if filled.data_ptr() != output.data_ptr() or filled.stride() != output.stride():
                raise ConformanceError(
                    f"{name} was given a strided output and returned another tensor: it ignores its argument output, "
                    "or that it is strided"
                )
            result = output.clone() if asked is None else asked.copy_(output)
            output.copy_(blank)
            if differs(whole.cpu(), before.cpu()):
                raise ConformanceError(f"{name} wrote beside its strided output: it ignores the strides")
            _unchanged(name, parts, given)
            return (result, *lse) if lse else result

        return attend

    def write(key: Tensor, value: Tensor | None, kv_cache: Any, metadata: AttentionMetadata) -> None:
        nonlocal inside
        if inside:
            write_cache(key, value, kv_cache, metadata)
            return
        parts, given = _strided({"key": key, "value": value}, layout)
        inside = True
        try:
            write_cache(given["key"], given.get("value"), kv_cache, metadata)
        finally:
            inside = False
        _unchanged("write_cache", parts, given)

    impl.forward = attending(forward, "forward")  # type: ignore[method-assign]
    impl.forward_with_lse = attending(forward_with_lse, "forward_with_lse")  # type: ignore[method-assign]
    impl.write_cache = write  # type: ignore[method-assign]
    return engine


def fused(*parts: Tensor) -> list[Tensor]:
    """Copies of tensors (T, heads, size) as slices of one tensor (T, the sum of heads * size); of one tensor alone
    beside ``GAP`` elements."""
    whole = torch.cat([part.flatten(1) for part in parts], dim=1)
    if len(parts) == 1:
        whole = torch.cat([whole, whole.new_full((len(whole), GAP), BETWEEN)], dim=1)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.shape[1] * part.shape[2])
    slices = [whole[:, start:end] for start, end in pairwise(ends)]
    return [piece.view(part.shape) for piece, part in zip(slices, parts, strict=True)]


def gapped(part: Tensor, gap: int = GAP) -> Tensor:
    """A copy of a tensor (T, heads, size) with ``gap`` elements between its heads."""
    tokens, heads, size = part.shape
    found = part.new_full((tokens, heads, size + gap), BETWEEN)[:, :, :size]
    found.copy_(part)
    return found


def _strided(parts: Mapping[str, Tensor | None], layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that there are by name, and strided copies; those of as many tokens are fused (an encoder's keys
    have another number than the queries of a cross layer)."""
    held = {name: part for name, part in parts.items() if part is not None}
    if layout == "gaps":
        # Values by other strides than keys, as where those are new tensors, rotated, and these a slice.
        return held, {name: gapped(part, 2 * GAP if name == "value" else GAP) for name, part in held.items()}
    given: dict[str, Tensor] = {}
    for length in {len(part) for part in held.values()}:
        together = {name: part for name, part in held.items() if len(part) == length}
        given |= zip(together, fused(*together.values()), strict=True)
    return held, given


def _three(given: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(given.get(name) for name in ("query", "key", "value"))


def _unchanged(method: str, parts: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, original in parts.items():
        if differs(given[name].cpu(), original.cpu()):
            raise ConformanceError(f"{method} changed its strided argument {name}")


def _storage(part: Tensor) -> Tensor:
    """All of the memory that a tensor is a part of."""
    return torch.as_strided(part, (part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)
