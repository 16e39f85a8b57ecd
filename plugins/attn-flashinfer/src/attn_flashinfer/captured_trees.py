"""Draft trees in captured graphs: a wrapper for each size, whose mask is renewed with each step's plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attn_flashinfer.device_plan import DevicePlan, Layout
from attn_flashinfer.library import Library
from attn_flashinfer.pages import Pages, full
from attn_flashinfer.trees import MaskMemory, Masks, packed_mask
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import KERNELS, CapturedRun, LayerSettings, plain_tensors


class CapturedTrees:
    """Decodes of ``query_len`` tokens, among them draft trees, in the graph of one captured size.

    The graph reads a mask, in each replay that of its step; a step without trees has one too, in which all is causal.
    Pages and lengths lie in arrays of the wrapper's own, which a plan writes. ``memory`` has room for the mask of the
    largest step, ``mask_bytes``; sizes of one builder, whose steps run one after another, may share it.
    """

    layout: Layout | None = None
    why_plan = "the masks of draft trees are made on the host, with each step's plan"
    device_plan: DevicePlan | None = None

    def __init__(
        self,
        library: Library,
        workspace: Workspace,
        settings: LayerSettings,
        *,
        indices: Tensor,
        num_reqs: int,
        query_len: int,
        max_seq_len: int,
        memory: MaskMemory,
    ) -> None:
        shape, device = settings.shape, settings.shape.device
        self.num_reqs, self.query_len, self.memory = num_reqs, query_len, memory
        self._window, self._none = settings.window, indices[:0]
        # Of a tree's tokens the second may be as deep as the last: siblings.
        self._lag = 0 if settings.window is None else max(query_len - 2, 0)
        self._sizes = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size
        self._starts = torch.arange(num_reqs + 1, dtype=torch.int32, device="cpu") * query_len
        with plain_tensors():
            starts, indptr, last_page_len, self._places = (
                torch.zeros(num_reqs + more, dtype=torch.int32, device=device) for more in (1, 1, 0, 1)
            )
            wrapper = self._wrapper = library.prefill(
                workspace.buffer,
                shape.layout,
                use_cuda_graph=True,
                qo_indptr_buf=starts,
                paged_kv_indptr_buf=indptr,
                paged_kv_indices_buf=indices,
                paged_kv_last_page_len_buf=last_page_len,
                custom_mask_buf=memory.buffer,
                mask_indptr_buf=self._places,
                backend=KERNELS,
            )
        self.run = CapturedRun(wrapper.run, device)
        self._keywords = {
            **settings.keywords(), "o_data_type": shape.dtype, "causal": True, "max_token_per_sequence": query_len,
        }  # fmt: skip
        if settings.window is not None:
            self._keywords["window_left"] += self._lag
        if shape.block_size > 1:  # of pages of one token FlashInfer has a kernel for trees of 4, and compiles it
            self._keywords["uniform_q_len"] = query_len
        self._start(workspace, full(num_reqs, max(max_seq_len, query_len), shape.block_size))

    @staticmethod
    def mask_bytes(num_reqs: int, query_len: int, max_seq_len: int) -> int:
        """What the mask of the largest step of a size takes."""
        return num_reqs * -(-query_len * max(max_seq_len, query_len) // 8)

    def plan(self, pages: Pages, masks: Masks) -> None:
        """Plans a step of the size on the host; ``masks`` int64[num_reqs * query_len] is its ``tree_mask``."""
        self.run.planned = None
        lengths = pages.lengths(self._sizes[-1])
        packed, places = self.memory.put(packed_mask(masks, self._starts.numpy(), lengths, self._window, self._lag))
        self._wrapper.plan(
            self._starts, pages.indptr, self._none, pages.last_page_len, *self._sizes,
            **self._keywords, seq_lens=pages.seq_lens, packed_custom_mask=packed,
        )  # fmt: skip
        self._places.copy_(places)  # the plan has written others: see point_at

    def _start(self, workspace: Workspace, most: Pages) -> None:
        """Takes the memory that the size may need, and makes the first plan, which settles the kernels."""
        float_bytes, int_bytes = self._wrapper.workspace_size(
            self._starts, most.indptr, self._none, most.last_page_len, *self._sizes,
            **self._keywords, seq_lens=most.seq_lens, packed_custom_mask=self.memory.buffer,
        )  # fmt: skip
        workspace.reserve(float_bytes)
        with plain_tensors():
            own = torch.empty(-(-int_bytes // 4096) * 4096, dtype=torch.uint8, device=workspace.device)
        self._wrapper.reset_workspace_buffer(workspace.buffer, own)
        self.plan(most, np.zeros(self.num_reqs * self.query_len, np.int64))
