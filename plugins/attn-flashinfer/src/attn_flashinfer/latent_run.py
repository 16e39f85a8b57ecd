"""What a layer over a latent cache calls: FlashInfer's compiled module, or the wrapper where that shows none.

A wrapper checks all that it is given in every call of every layer, and passes it on to its module. Most of it does not
change between the layers of a step: here the cache is compared once, and query and output by dtype and shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_flashinfer import device_plan
from attn_flashinfer.wrappers import LayerSettings, Shape

_ALIGNMENT = 16  # bytes that the kernels load of a row at a time

_CAUSAL, _NOT_CAUSAL = 1, 0
_SHOWN = (
    "_cached_module", "_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer",
    "_plan_info", "_kv_indices_buf",
)  # fmt: skip


class LatentCache(NamedTuple):
    """A latent cache as the kernels take it."""

    rows: Tensor
    """(blocks, block_size, head_size)"""
    values: Tensor
    """A view of the first head_size_v columns of ``rows``."""
    rest: Tensor
    """A view of the other columns: the rotated part of the keys."""


class Module(NamedTuple):
    """What a planned wrapper shows: its compiled module, and the memory that a plan takes."""

    module: Any
    floats: Tensor
    """Of partial results, on the device."""
    ints: Tensor
    """Of the plan, on the device."""
    pinned: Tensor
    """Of the plan, on the host, from where it is copied to the device."""
    info: Any
    """FlashInfer's description of the last plan: its grid and the places of its arrays."""
    indices: Tensor
    """Pages, on the device."""

    @classmethod
    def of(cls, wrapper: Any, version: str) -> Module | None:
        """What ``wrapper``, which was planned, shows; None where a part is not shown, or the version is not known."""
        if device_plan.why_not(version) or not all(hasattr(wrapper, name) for name in _SHOWN):
            return None
        return cls(*(getattr(wrapper, name) for name in _SHOWN))

    def plan(self, starts: Tensor, indptr: Tensor, lens: Tensor, num_heads: int, head_size_v: int, causal: bool) -> Any:
        """Plans rows anew, int32 arrays on the host, and returns the description.

        Callers see to it that there is room for the pieces of work: it writes beyond its memory otherwise.
        """
        memory = self.floats, self.ints, self.pinned
        return self.module.plan(*memory, starts, indptr, lens, num_heads, head_size_v, causal)


class LatentRun:
    """The call of a planned step. ``planned`` is called behind each plan, before any layer's call."""

    def __init__(self, wrapper: Any, settings: LayerSettings, head_size_v: int) -> None:
        self._wrapper, self._shape, self._scale = wrapper, settings.shape, settings.scale
        self._size_v, self._is_fp8 = head_size_v, settings.shape.cache_dtype.itemsize == 1
        self._module: Module | None = None
        self._mask = _NOT_CAUSAL

    def planned(self, module: Module | None, causal: bool) -> None:
        """Takes what the plan left; without ``module`` the wrapper runs it."""
        self._module, self._mask = module, _CAUSAL if causal else _NOT_CAUSAL

    def __call__(
        self,
        query: Tensor,
        cache: LatentCache,
        *,
        out: Tensor,
        k_scale: float = 1.0,
        return_lse: bool = False,
    ) -> Any:
        """``out`` (T, num_heads, head_size_v), and where it is asked for the log-sum-exp, float32 (T, num_heads), to
        base 2. ``query`` is (T, num_heads, head_size)."""
        if not query.is_contiguous():
            query = _aligned(query)
        planned, shape, size_v = self._module, self._shape, self._size_v
        if planned is None:
            scales = {"ckv_scale": k_scale, "kpe_scale": k_scale} if self._is_fp8 else {}
            return self._wrapper.run(query=query, kv_cache=cache.rows, out=out, return_lse=True, **scales)
        if query.dtype is not shape.dtype or query.shape[1:] != (shape.num_heads, shape.head_size):
            raise ValueError(_unfit("query", query, shape, shape.head_size))
        if out.dtype is not shape.dtype or out.shape != (len(query), shape.num_heads, size_v):
            raise ValueError(_unfit("output", out, shape, size_v))
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if return_lse else None
        planned.module.run(
            planned.floats, planned.ints, planned.info, query[..., :size_v], query[..., size_v:], cache.values,
            cache.rest, planned.indices, out, lse, self._mask, shape.num_heads, shape.block_size, self._scale, False,
            k_scale, k_scale, None,
        )  # fmt: skip
        return out, lse


def latent_cache(rows: Tensor, shape: Shape, head_size_v: int) -> LatentCache:
    """``rows`` (blocks, block_size, head_size) as the kernels take them; ValueError where they cannot load them."""
    expected = shape.block_size, shape.head_size
    if rows.dtype is not shape.cache_dtype or rows.shape[1:] != expected:
        raise ValueError(
            f"kv_cache: {rows.dtype} {tuple(rows.shape)} found; the backend was made for {shape.cache_dtype} (blocks, "
            f"{expected[0]}, {expected[1]})"
        )
    if rows.stride(2) != 1 or not _is_aligned(rows):
        raise ValueError(
            f"kv_cache: strides {rows.stride()} at address {rows.data_ptr():#x} found; rows have to lie in one piece, "
            f"and to begin at multiples of {_ALIGNMENT} bytes"
        )
    return LatentCache(rows, rows[..., :head_size_v], rows[..., head_size_v:])


def _unfit(name: str, found: Tensor, shape: Shape, size: int) -> str:
    return (
        f"{name}: {found.dtype} {tuple(found.shape)} found; this backend was made for {shape.dtype} (tokens, "
        f"{shape.num_heads}, {size}), of as many tokens in query and output"
    )


def _is_aligned(tensor: Tensor) -> bool:
    unit = _ALIGNMENT // tensor.element_size()
    return not tensor.data_ptr() % _ALIGNMENT and not any(stride % unit for stride in tensor.stride()[:-1])


def _aligned(query: Tensor) -> Tensor:
    """``query``, or a copy where a row of a head does not begin where a kernel may load."""
    return query if query.stride(-1) == 1 and _is_aligned(query) else query.contiguous()
