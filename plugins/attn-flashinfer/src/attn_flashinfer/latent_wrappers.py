"""FlashInfer's wrapper of latent attention behind a ``plan`` that takes a step's rows and a ``run`` that a layer calls.

One plan serves rows of any numbers of tokens. It needs as much of the workspace for every step, and its own memory on
the device, which a step's plan is copied to behind the kernels of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flashinfer import device_plan
from attn_flashinfer.library import Library
from attn_flashinfer.pages import Pages
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import LayerSettings, Shape, plain_tensors

ALIGNMENT = 16
"""Bytes that the kernels load of a row at a time."""

_TILE = 64  # packed queries (tokens times heads) that a thread block holds
_WORKS = 16384  # pieces of work that a plan has room for


@dataclass(frozen=True)
class LatentShape(Shape):
    """What all layers over latent caches of a backend share: ``head_size`` is the whole row's."""

    head_size_v: int
    kernels: str
    """fa2 or fa3."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory for partial results: two tiles of 16 bits for each thread block, and their logarithms."""
        return 2 * device_plan.processors(self.device) * _TILE * (2 * self.head_size_v + 4) + 2 * ALIGNMENT


def shape_of(settings: LayerSettings) -> LatentShape:
    """The shape of layers over latent caches."""
    shape = settings.shape
    assert isinstance(shape, LatentShape)
    return shape


class LatentRun:
    """A wrapper's ``run`` as layers call it: it is planned with the log-sum-exp, which is small, for all layers."""

    def __init__(self, run: Callable[..., Any], shape: LatentShape) -> None:
        self._run, self._is_fp8 = run, shape.cache_dtype.itemsize == 1
        self.lse: Tensor
        """float32 (tokens, num_heads) on the device: where the log-sum-exp goes, to base 2."""

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        out: Tensor,
        k_scale: float = 1.0,
        return_lse: bool = False,
    ) -> Any:
        scales = {"ckv_scale": k_scale, "kpe_scale": k_scale} if self._is_fp8 else {}
        if not query.is_contiguous():
            query = _aligned(query)
        return self._run(query=query, kv_cache=cache, out=out, lse=self.lse, return_lse=True, **scales)


class EagerLatent:
    """Rows of any numbers of tokens, behind any contexts, each seeing those before it and itself."""

    def __init__(self, library: Library, workspace: Workspace, settings: LayerSettings) -> None:
        self._shape = shape = shape_of(settings)
        self._wrapper, self._rows = _wrapper(library, workspace, shape)
        self._keywords = _keywords(settings)
        self.run = LatentRun(self._wrapper.run, shape)
        self._lse = _no_lse(shape, 0)

    def plan(self, pages: Pages, starts: Tensor, count: int, longest: int) -> None:
        """Plans rows whose queries begin at ``starts`` int32[n + 1] on the host, ``count`` in all, of ``longest`` at
        most."""
        if len(self._lse) < count:
            self._lse = _no_lse(self._shape, count)
        self.run.lse = self._lse[:count]
        rows = self._rows(starts, pages.indptr, pages.indices, lengths(pages, self._shape.block_size))
        try:
            self._wrapper.plan(metadata=rows, causal=longest > 1, **self._keywords)
        except ValueError as error:
            raise ValueError(f"metadata: FlashInfer refuses to plan this step: {error}") from error


class CapturedLatent:
    """Rows of ``query_len`` tokens in the graph of one captured size, whose pages lie at ``indices`` in every step."""

    def __init__(
        self,
        library: Library,
        workspace: Workspace,
        settings: LayerSettings,
        *,
        indices: Tensor,
        num_reqs: int,
        query_len: int,
    ) -> None:
        self._shape = shape = shape_of(settings)
        self.num_reqs, self.query_len = num_reqs, query_len
        self.device_plan: None = None
        self.why_plan = "plans of latent attention are made on the host"
        on_host: Any = {"dtype": torch.int32, "device": "cpu"}
        self._indices, self._workspace = indices, workspace
        tiles = num_reqs * -(-query_len * shape.num_heads // _TILE)
        if tiles + device_plan.processors(shape.device) > _WORKS:
            raise ValueError(
                f"metadata: a captured size of num_reqs {num_reqs}, each of query length {query_len}, is cut into more "
                f"than the {_WORKS} pieces that a plan of FlashInfer has room for; capture a smaller size"
            )
        with plain_tensors():
            self._starts = torch.arange(num_reqs + 1, **on_host) * query_len
            nothing = torch.zeros(num_reqs + 1, **on_host)
            own: Any = {"dtype": torch.int32, "device": shape.device}
            self._wrapper, self._rows = _wrapper(
                library,
                workspace,
                shape,
                use_cuda_graph=True,
                qo_indptr=torch.zeros(num_reqs + 1, **own),
                kv_indptr=torch.zeros(num_reqs + 1, **own),
                kv_len_arr=torch.zeros(num_reqs, **own),
                kv_indices=indices,
            )
            self._keywords = {**_keywords(settings), "causal": query_len > 1}
            self._plan_whole(indices[:0], nothing, nothing[1:])  # settles the kernels and the places of all arrays
            self.run = LatentRun(self._wrapper.run, shape)
            self.run.lse = _no_lse(shape, num_reqs * query_len)
            self._replan = self._fast_plan(nothing, nothing[1:])

    def plan(self, pages: Pages) -> None:
        """Plans a step of the size on the host."""
        lens = lengths(pages, self._shape.block_size)
        if self._replan is None:
            self._plan_whole(self._indices, pages.indptr, lens)
        else:
            self._replan(pages.indptr, lens)

    def _plan_whole(self, indices: Tensor, indptr: Tensor, lens: Tensor) -> None:
        self._wrapper.plan(metadata=self._rows(self._starts, indptr, indices, lens), **self._keywords)

    def _fast_plan(self, indptr: Tensor, lens: Tensor) -> Callable[[Tensor, Tensor], Any] | None:
        """What renews the plan in its place, by what a wrapper shows for that: it copies the plan alone, where a whole
        plan copies the memory of the last one and all metadata. None where this FlashInfer does not show it, or would
        put arrays elsewhere."""
        wrapper, shape = self._wrapper, self._shape
        names = (
            "_cached_module", "_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer",
            "_plan_info",
        )  # fmt: skip
        if not all(hasattr(wrapper, name) for name in names):
            return None
        module, floats, ints, pinned, info = (getattr(wrapper, name) for name in names)
        memory = floats, ints, pinned, self._starts
        causal = self._keywords["causal"]

        def replan(indptr: Tensor, lens: Tensor) -> Any:
            return module.plan(*memory, indptr, lens, shape.num_heads, shape.head_size_v, causal)

        try:
            again = replan(indptr, lens)
        except (TypeError, AttributeError):  # another signature
            return None
        return replan if list(again) == list(info) else None


def lengths(pages: Pages, block_size: int) -> Tensor:
    """int32[n] on the host: the keys of each row, by its pages where its length says something else."""
    if pages.seq_lens is not None:
        return pages.seq_lens
    counts = pages.indptr.diff()
    return torch.where(counts > 0, (counts - 1) * block_size + pages.last_page_len, 0).to(torch.int32)


def _wrapper(library: Library, workspace: Workspace, shape: LatentShape, **graph: Any) -> tuple[Any, Any]:
    """A wrapper, and what makes the rows of its plans."""
    if library.latent is None or library.latent_rows is None:
        raise ValueError("use_mla: this FlashInfer has no wrapper of latent attention")
    workspace.reserve(shape.workspace_bytes)
    with plain_tensors():
        return library.latent(workspace.buffer, backend=shape.kernels, **graph), library.latent_rows


def _keywords(settings: LayerSettings) -> dict[str, Any]:
    shape = shape_of(settings)
    return {
        "num_heads": shape.num_heads,
        "head_dim_ckv": shape.head_size_v,
        "head_dim_kpe": shape.head_size - shape.head_size_v,
        "page_size": shape.block_size,
        "sm_scale": settings.scale,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.cache_dtype,
        "lse_mode": "base2",
    }


def _no_lse(shape: LatentShape, count: int) -> Tensor:
    with plain_tensors():
        return torch.empty((count, shape.num_heads), dtype=torch.float32, device=shape.device)


def _aligned(query: Tensor) -> Tensor:
    """``query``, or a copy where a row of a head does not begin where a kernel may load."""
    unit = ALIGNMENT // query.element_size()
    if query.data_ptr() % ALIGNMENT or any(stride % unit for stride in query.stride()[:-1]):
        return query.contiguous()
    return query
