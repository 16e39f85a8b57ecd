"""FlashInfer's wrappers, each behind a ``plan`` that takes a part of a step and a ``run`` that a layer calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_flashinfer import device_plan
from attn_flashinfer.device_plan import DevicePlan, Layout, Sizes
from attn_flashinfer.library import Library
from attn_flashinfer.pages import Pages, full
from attn_flashinfer.trees import MaskMemory, Masks, lag_of, packed_mask, point_at
from attn_flashinfer.workspace import INT_BYTES, Workspace
from attncore.graphs import is_capturing

KERNELS = "fa2"
"""FlashInfer's generation of kernels: at pages of 16 tokens, and for short queries, faster than fa3 in plan and run."""


@dataclass(frozen=True)
class Shape:
    """What all layers of a backend share."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    layout: str
    device: str
    tensor_cores: bool
    """Whether decodes of one token run on tensor cores."""


@dataclass(frozen=True)
class LayerSettings:
    """What layers that share a plan share: the keywords of their plans."""

    shape: Shape
    scale: float
    window: int | None
    soft_cap: float | None

    def keywords(self) -> dict[str, Any]:
        """Keywords of both wrappers' plans; a window of W tokens is W - 1 to the left of the query's own."""
        return {
            "sm_scale": self.scale,
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.shape.dtype,
            "kv_data_type": self.shape.cache_dtype,
        }


class EagerDecode:
    """Decodes of one token, of any number of requests."""

    def __init__(self, library: Library, workspace: Workspace, settings: LayerSettings) -> None:
        shape = settings.shape
        with plain_tensors():
            self._wrapper = library.decode(
                workspace.buffer, shape.layout, use_tensor_cores=shape.tensor_cores, backend=KERNELS
            )
            _serve(workspace, self._wrapper, shape.device)
        self.run: Callable[..., Any] = self._wrapper.run
        self._room = _Room(workspace, self._wrapper)
        self._sizes = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size
        self._keywords = {**settings.keywords(), "o_data_type": shape.dtype}

    def plan(self, pages: Pages, first: int, last: int) -> None:
        """Plans rows first..last of a step."""
        indptr, last_page_len, seq_lens, indices = pages.rows(first, last)
        self._room.plan(
            self._wrapper.plan,
            (indptr, indices, last_page_len, *self._sizes),
            {**self._keywords, "seq_lens": seq_lens},
        )


class EagerAppend:
    """Queries of any lengths behind any contexts: prompts, chunks of them, decodes of several tokens."""

    def __init__(self, library: Library, workspace: Workspace, settings: LayerSettings, *, causal: bool = True) -> None:
        shape = settings.shape
        with plain_tensors():
            self._wrapper = library.prefill(workspace.buffer, shape.layout, backend=KERNELS)
            _serve(workspace, self._wrapper, shape.device)
        self.run: Callable[..., Any] = self._wrapper.run
        self._room = _Room(workspace, self._wrapper)
        self._sizes = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size
        self._keywords = {**settings.keywords(), "o_data_type": shape.dtype, "causal": causal}
        self._window, self._device = settings.window, shape.device
        self._masks: MaskMemory | None = None

    def plan(
        self, pages: Pages, first: int, last: int, starts: Tensor, longest: int, masks: Masks | None = None
    ) -> None:
        """Plans rows first..last, whose queries begin at ``starts`` int32[last - first + 1] on the host, the first at
        0; none is longer than ``longest``. ``masks``: ``tree_mask`` of their tokens, where some are in a tree."""
        rows = pages.rows(first, last)
        indptr, last_page_len, seq_lens, indices = rows
        arguments = starts, indptr, indices, last_page_len, *self._sizes
        keywords = {**self._keywords, "seq_lens": seq_lens, "max_token_per_sequence": longest}
        if masks is None:
            self._room.plan(self._wrapper.plan, arguments, keywords)
            return
        if self._masks is None:
            self._masks = MaskMemory(self._device)
        begins, lag = starts.numpy(), 0
        if self._window is not None:
            lag = lag_of(masks, begins)
            keywords["window_left"] += lag
        mask = packed_mask(masks, begins, rows.lengths(self._sizes[-1]), self._window, lag)
        packed, places = self._masks.put(mask)
        self._room.plan(self._wrapper.plan, arguments, {**keywords, "packed_custom_mask": packed})
        point_at(self._wrapper, places.to(torch.int32))


class CapturedRun:
    """A captured size's ``run``. Steps of a size whose graph plans by itself are not planned when they are built: one
    that is run without the graph is planned here, by ``node``."""

    def __init__(self, run: Callable[..., Any], device: str) -> None:
        self.run, self._device = run, device
        self.node: DevicePlan | None = None
        self.planned: Any = None
        """In a capture whose plan is made on a branch: the event of its end, until the first layer has waited."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.node is not None:
            if not is_capturing(self._device):
                self.node()
            elif self.planned is not None:
                torch.cuda.current_stream().wait_event(self.planned)
            self.planned = None
        return self.run(*args, **keywords)


class CapturedDecode:
    """Decodes of ``query_len`` tokens in the graph of one captured size.

    ``indptr``, ``indices`` and ``last_page_len`` are the device's arrays at the addresses that every step of the size
    has: the graph reads them there, so that a plan copies what FlashInfer made, and nothing else. ``proves``: whether
    to find out that a kernel writes the same plans on the device.
    """

    def __init__(
        self,
        library: Library,
        workspace: Workspace,
        settings: LayerSettings,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        query_len: int,
        max_seq_len: int,
        proves: bool = False,
    ) -> None:
        shape = settings.shape
        self._plan = library.fast_decode_plan
        with plain_tensors():
            wrapper = self._wrapper = library.decode(
                workspace.buffer,
                shape.layout,
                use_cuda_graph=True,
                use_tensor_cores=shape.tensor_cores or query_len > 1,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
                backend=KERNELS,
            )
        self.run = CapturedRun(wrapper.run, shape.device)
        self.num_reqs, self.query_len, self.address = len(last_page_len), query_len, indptr.data_ptr()
        self._none, self._device = indices[:0], shape.device
        self._sizes = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size
        self._keywords = {**settings.keywords(), "q_len_per_req": query_len}
        self._plan_sizes = Sizes(
            self.num_reqs, query_len, shape.num_heads, shape.num_kv_heads, shape.block_size,
            self._keywords["window_left"], device_plan.processors(shape.device),
        )  # fmt: skip
        self.layout: Layout | None = None
        """Of the plans that the device makes; None: it makes none, and ``why_plan`` says why."""
        self.why_plan = "nothing was asked of the device"
        self.device_plan: DevicePlan | None = None
        """What plans this size, and those of the other keys, on the device."""
        most = full(self.num_reqs, max(max_seq_len, query_len), shape.block_size)
        self._start(workspace, most, indptr, last_page_len)
        if proves:
            self._prove(library.version, most)

    def table_row(self) -> list[int]:
        """What the kernel must know to plan this size for its key; only where there is a layout."""
        assert self.layout is not None
        return device_plan.table_row(self.layout, self._plan_sizes, self._int_workspace.data_ptr())

    def _prove(self, version: str, most: Pages) -> None:
        """Finds out whether the device plans as FlashInfer does; leaves the plan of the largest lengths."""
        if why := device_plan.why_not(version):
            self.why_plan = why
            return

        def plan(indptr: Tensor) -> Any:
            self._plan_pages(indptr, most.last_page_len)
            return getattr(self._wrapper, "_plan_info", None)

        self.layout, self.why_plan = device_plan.prove(plan, self._int_workspace, self._plan_sizes, int(most.indptr[1]))
        plan(most.indptr)
        if self._device.startswith("cuda"):  # before the next plan writes to the same pinned memory
            torch.cuda.current_stream().synchronize()

    def _start(self, workspace: Workspace, most: Pages, indptr: Tensor, last_page_len: Tensor) -> None:
        """Takes the memory that the size may need, and makes the first plan, which settles the kernels."""
        arguments = most.indptr, self._none, most.last_page_len, *self._sizes
        keywords = {**self._keywords, "o_data_type": self._keywords["q_data_type"], "seq_lens": most.seq_lens}
        float_bytes, int_bytes = self._wrapper.workspace_size(*arguments, **keywords)
        workspace.reserve(float_bytes)
        with plain_tensors():
            own = torch.empty(-(-int_bytes // 4096) * 4096, dtype=torch.uint8, device=workspace.device)
        self._int_workspace = own
        self._wrapper.reset_workspace_buffer(workspace.buffer, own)
        before = indptr.clone(), last_page_len.clone()  # a first plan writes to them
        self._wrapper.plan(*arguments, **keywords)
        indptr.copy_(before[0])
        last_page_len.copy_(before[1])

    def plan(self, pages: Pages) -> None:
        """Plans a step of the size on the host."""
        self.run.planned = None  # of a capture in which no layer of this key ran
        self._plan_pages(pages.indptr, pages.last_page_len)

    def _plan_pages(self, indptr: Tensor, last_page_len: Tensor) -> None:
        self._plan(
            self._wrapper, indptr, self._none, last_page_len, *self._sizes,
            global_override_indptr_cpu=indptr, **self._keywords,
        )  # fmt: skip


class _Room:
    """A wrapper's plans, with a larger workspace where one asks for more."""

    def __init__(self, workspace: Workspace, wrapper: Any) -> None:
        self._workspace, self._wrapper = workspace, wrapper

    def plan(self, plan: Callable[..., None], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        try:
            plan(*arguments, **keywords)
        except RuntimeError as error:
            if "workspace" not in str(error):
                raise
            float_bytes, int_bytes = self._wrapper.workspace_size(*arguments, **keywords)
            if int_bytes > INT_BYTES:
                raise ValueError(
                    f"metadata: the plan of this step needs {int_bytes} bytes beside the workspace, {INT_BYTES} are "
                    "there; run fewer tokens in a step"
                ) from error
            self._workspace.reserve(float_bytes)
            plan(*arguments, **keywords)


def plain_tensors() -> Any:
    """What a wrapper makes when the first step is built in inference mode, plans of steps outside of it write to."""
    return torch.inference_mode(False)


def _serve(workspace: Workspace, wrapper: Any, device: str) -> None:
    workspace.serve(wrapper, torch.empty(INT_BYTES, dtype=torch.uint8, device=device))
