"""The block sizes and cache layouts that a spec and a request have in common, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable

from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import Sizes


def common_block_sizes(spec: BackendSpec, request: AttentionRequest) -> Sizes:
    """The block sizes of the kernel that both accept, in tokens; an empty frozenset where there is none."""
    accepted: Sizes = spec.block_sizes  # type: ignore[assignment]
    if request.block_size is not None:
        return frozenset({request.block_size} if request.block_size in accepted else ())
    if request.manager_block_size is not None:
        return frozenset(sizes.divisors_within(accepted, request.manager_block_size))
    return accepted


def common_layouts(spec: BackendSpec, request: AttentionRequest) -> tuple[str, ...]:
    """The cache layouts that both accept, the backend's preferred one first."""
    return tuple(name for name in spec.kv_cache_layouts if request.kv_cache_layout in (None, name))


def choose_block_size(block_sizes: Sizes, request: AttentionRequest, preferred: Iterable[int | None]) -> int:
    """One of ``block_sizes``: the first of ``preferred`` among them; else, where the request gives the manager's block,
    the largest, which divides it; else the smallest.
    """
    chosen = next((size for size in preferred if size is not None and size in block_sizes), None)
    if chosen is None and isinstance(block_sizes, frozenset) and request.manager_block_size is not None:
        return max(block_sizes)
    return chosen or sizes.smallest(block_sizes)
