"""Prefills of the stand-in: the wrapper, with the signatures of FlashInfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flashinfer_standin_wrapper import INT_WORKSPACE, Wrapper, row_lengths
from torch import Tensor


class Prefill(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._made(float_workspace_buffer, kv_layout)
        self.backend, self.graph = backend, use_cuda_graph
        self._kv_lens_buffer = torch.empty(1024, dtype=torch.int32)
        buffers = {
            "qo_indptr_buf": qo_indptr_buf, "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf, "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }  # fmt: skip
        if use_cuda_graph:
            check_buffers(buffers)
        self.buffers: list[Any] = list(buffers.values())
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self.most_rows: int | None = None

    def workspace_size(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> tuple[int, int]:
        return self.recorder.asks, INT_WORKSPACE

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        self.keywords = dict(locals())
        self._record("prefill.plan", self.keywords)
        self._kv_lens_buffer[: len(paged_kv_indptr) - 1].copy_(paged_kv_indptr[1:])  # in place, as there
        if custom_mask is not None:
            raise NotImplementedError("custom_mask: the stand-in takes packed masks")
        counts = qo_indptr.diff()
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        # As there: of packed masks, which begin at bytes, places in bits.
        places = torch.cat((torch.zeros(1), torch.cumsum(counts * lengths, 0))).to(qo_indptr.dtype)
        if packed_custom_mask is not None:
            check_mask(packed_custom_mask, counts, torch.where(paged_kv_indptr.diff() > 0, lengths, 0))
        if uniform_q_len is not None and not bool((counts == uniform_q_len).all()):
            raise ValueError(f"uniform_q_len: {uniform_q_len} promised, {counts.tolist()} given")
        arrays = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        if not self.graph:
            self.buffers, self._custom_mask_buf = arrays, packed_custom_mask
            self._mask_indptr_buf = None if packed_custom_mask is None else places
            return
        self.most_rows = int(qo_indptr[-1]) if self.most_rows is None else self.most_rows
        if int(qo_indptr[-1]) > self.most_rows or len(qo_indptr) != len(self.buffers[0]):
            raise ValueError("qo_indptr: a captured size has one number of requests, and no more rows than at first")
        for buffer, array in zip(self.buffers, arrays, strict=True):
            buffer[: len(array)].copy_(array)
        if packed_custom_mask is not None:
            if self._custom_mask_buf is None:
                raise ValueError("custom_mask_buf must be initialized with a torch.Tensor in cuda graph mode")
            if self._mask_indptr_buf is None:
                raise ValueError("mask_indptr_buf must be initialized with a torch.Tensor in cuda graph mode")
            self._custom_mask_buf[: len(packed_custom_mask)].copy_(packed_custom_mask)
            self._mask_indptr_buf.copy_(places)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        starts, indptr, indices, last = self.buffers
        if len(q) != int(starts[-1]):
            raise ValueError(f"q: {len(q)} rows, qo_indptr ends at {int(starts[-1])}")
        out = torch.empty_like(q) if out is None else out
        found = torch.empty(q.shape[:2])
        rows = row_lengths(starts.diff().tolist(), indptr, last, self.keywords["page_size"])
        masks = None if self._custom_mask_buf is None else self._masks(rows)
        self._attend(
            q, paged_kv_cache, rows, out, found, causal=self.keywords["causal"], masks=masks, indices=indices,
            k_scale=k_scale or 1.0, v_scale=v_scale or 1.0,
        )  # fmt: skip
        return (out, found) if return_lse else out

    def _masks(self, rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """The mask of each row, as kernels read it: no bit behind the row's last query and key."""
        packed, places = self._custom_mask_buf, self._mask_indptr_buf
        assert packed is not None
        assert places is not None
        masks = []
        for place, (tokens, _, length) in zip(places.tolist(), rows, strict=False):
            size = -(-tokens * length // 8)
            if place < 0 or place + size > len(packed):
                raise IndexError(f"custom_mask_buf: bytes {place} to {place + size} read, of {len(packed)}")
            bits = np.unpackbits(packed[place : place + size].numpy(), bitorder="little")[: tokens * length]
            masks.append(torch.from_numpy(bits.astype(np.bool_)).view(tokens, length))
        return masks


def check_buffers(buffers: dict[str, Tensor | None]) -> None:
    for name, buffer in buffers.items():
        if buffer is None:
            raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
    count = len(buffers["qo_indptr_buf"])  # type: ignore[arg-type]
    if len(buffers["paged_kv_indptr_buf"]) != count:  # type: ignore[arg-type]
        raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
    if len(buffers["paged_kv_last_page_len_buf"]) != count - 1:  # type: ignore[arg-type]
        raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")


def check_mask(packed: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """ValueError where a mask is not as long as its rows, whose bits begin at bytes: kernels would read others."""
    wanted = int(((counts * lengths + 7) // 8).sum())
    if packed.dtype != torch.uint8 or len(packed) != wanted:
        raise ValueError(f"packed_custom_mask: {packed.dtype}, {len(packed)} bytes given, {wanted} needed")
