"""Plans of latent attention: of eager steps and of captured sizes, each over a wrapper of FlashInfer.

One plan serves rows of any numbers of tokens. It needs as much of the workspace for every step, and its own memory on
the device, which a step's plan is copied to behind the kernels of the last one.

A wrapper's own ``plan`` takes memory anew and checks metadata in Python, or copies it to be able to restore it. So a
wrapper plans once, which settles its module and the place of every array, and the module's own ``plan`` does the rest.
Where FlashInfer does not show what that takes, the wrapper plans each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flashinfer import device_plan
from attn_flashinfer.latent_run import LatentRun, Module
from attn_flashinfer.library import Library
from attn_flashinfer.pages import Pages
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import LayerSettings, Shape, plain_tensors

_TILE = 64  # packed queries (tokens times heads) that a thread block holds
_WORKS = 16384  # pieces of work that a plan has room for
_ALIGNMENT = 16  # bytes between the parts of the workspace


@dataclass(frozen=True)
class LatentShape(Shape):
    """What all layers over latent caches of a backend share: ``head_size`` is the whole row's."""

    head_size_v: int
    kernels: str
    """fa2 or fa3."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory for partial results: two tiles of 16 bits for each thread block, and their logarithms."""
        return 2 * device_plan.processors(self.device) * _TILE * (2 * self.head_size_v + 4) + 2 * _ALIGNMENT


def shape_of(settings: LayerSettings) -> LatentShape:
    """The shape of layers over latent caches."""
    shape = settings.shape
    assert isinstance(shape, LatentShape)
    return shape


class EagerLatent:
    """Rows of any numbers of tokens, behind any contexts, each seeing those before it and itself."""

    def __init__(self, library: Library, workspace: Workspace, settings: LayerSettings) -> None:
        self._shape = shape = shape_of(settings)
        self._wrapper, self._rows = _wrapper(library, workspace, shape)
        self._keywords = _keywords(settings)
        self.run = LatentRun(self._wrapper, settings, shape.head_size_v)
        with plain_tensors():
            starts, none = (torch.tensor(row, dtype=torch.int32, device="cpu") for row in ([0, 1], [0, 0]))
            no_pages = torch.empty(0, dtype=torch.int32, device=shape.device)
            self._plan_whole(starts, none, no_pages, none[1:], causal=False)
            rows = starts, none, none[1:]
            self._module = settled(self._wrapper, library.version, rows, shape, causal=False)

    def plan(self, pages: Pages, starts: Tensor, count: int, longest: int) -> None:
        """Plans rows whose queries begin at ``starts`` int32[n + 1] on the host, ``count`` in all, of ``longest`` at
        most."""
        lens, causal, shape = lengths(pages, self._shape.block_size), longest > 1, self._shape
        module = self._module
        if module is not None and _most_works(count, len(lens), shape) <= _WORKS:
            info = module.plan(starts, pages.indptr, lens, shape.num_heads, shape.head_size_v, causal)
            self.run.planned(module._replace(info=info, indices=pages.indices), causal)
        else:
            self._plan_whole(starts, pages.indptr, pages.indices, lens, causal=causal)
            self.run.planned(None, causal)

    def _plan_whole(self, starts: Tensor, indptr: Tensor, indices: Tensor, lens: Tensor, *, causal: bool) -> None:
        rows = self._rows(starts, indptr, indices, lens)
        try:
            self._wrapper.plan(metadata=rows, causal=causal, **self._keywords)
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
            self._causal, self._keywords = query_len > 1, _keywords(settings)
            self._plan_whole(indices[:0], nothing, nothing[1:])  # settles the kernels and the places of all arrays
            rows = self._starts, nothing, nothing[1:]
            self._module = settled(self._wrapper, library.version, rows, shape, causal=self._causal)
        self.run = LatentRun(self._wrapper, settings, shape.head_size_v)
        self.run.planned(self._module, self._causal)

    def plan(self, pages: Pages) -> None:
        """Plans a step of the size on the host."""
        lens, shape = lengths(pages, self._shape.block_size), self._shape
        if self._module is None:
            self._plan_whole(self._indices, pages.indptr, lens)
        else:
            self._module.plan(self._starts, pages.indptr, lens, shape.num_heads, shape.head_size_v, self._causal)

    def _plan_whole(self, indices: Tensor, indptr: Tensor, lens: Tensor) -> None:
        rows = self._rows(self._starts, indptr, indices, lens)
        self._wrapper.plan(metadata=rows, causal=self._causal, **self._keywords)


def settled(
    wrapper: Any, version: str, rows: tuple[Tensor, Tensor, Tensor], shape: LatentShape, *, causal: bool
) -> Module | None:
    """The module of ``wrapper``, which has planned ``rows``: starts, page pointers and lengths, on the host. None where
    this FlashInfer does not show it, where its ``plan`` takes other arguments, or where it would put arrays elsewhere.
    """
    module = Module.of(wrapper, version)
    if module is None:
        return None
    try:
        again = module.plan(*rows, shape.num_heads, shape.head_size_v, causal)
    except (TypeError, AttributeError):
        return None
    return module if list(again) == list(module.info) else None


def _most_works(count: int, num_rows: int, shape: LatentShape) -> int:
    """The pieces of work that a plan of ``count`` tokens in ``num_rows`` rows has at most: its tiles, and as many more
    as there are multiprocessors, since contexts are cut for these alone."""
    packed = count * shape.num_heads
    tile = 2 * _TILE if packed // num_rows > _TILE else _TILE
    return packed // tile + num_rows + device_plan.processors(shape.device)


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
