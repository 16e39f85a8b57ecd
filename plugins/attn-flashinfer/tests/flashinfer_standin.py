"""A stand-in for FlashInfer on a CPU: the signatures of its public names, plans recorded, attention computed in torch.

What a wrapper runs is computed from the arrays that FlashInfer's kernels would read: the device's page list and lengths
of a captured size at the time of the run, those of the plan otherwise. So a plan that is given the wrong rows gives
wrong numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attn_flashinfer.backend import FlashInferBackend
from attn_flashinfer.library import Library
from torch import Tensor

from attncore import BackendConfig
from attncore.dense import dense_attention

INT_WORKSPACE = 1 << 16
"""What the stand-in's plans ask for beside the workspace."""


class Recorder:
    """Calls of plans, in order, as (name, arguments); and what a plan asks of the workspace."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.asks = 0
        self.asks_of = ""
        """Which plans ask; empty: all."""

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]


class _Wrapper:
    recorder: Recorder

    def _made(self, workspace: Tensor, layout: str) -> None:
        self._workspace, self._layout = workspace, layout
        self._int_workspace = torch.empty(0, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._workspace, self._int_workspace = float_workspace_buffer, int_workspace_buffer

    def _record(self, name: str, arguments: dict[str, Any]) -> None:
        self.recorder.calls.append((name, {key: one for key, one in arguments.items() if key != "self"}))
        if self._workspace.numel() < self.recorder.asks and self.recorder.asks_of in ("", name):
            raise RuntimeError("Buffer overflow when allocating memory. Increase the workspace buffer size.")

    def _attend(
        self, q: Tensor, caches: Any, rows: list[tuple[int, int, int]], out: Tensor, lse: Tensor, *,
        causal: bool, indices: Tensor, k_scale: float, v_scale: float,
    ) -> None:  # fmt: skip
        """``rows`` are (tokens, first page, keys): the tokens' queries, and where their keys are."""
        keys, values = caches if isinstance(caches, tuple) else caches.unbind(1)
        if self._layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        size, token = keys.shape[1], 0
        cap = self.keywords["logits_soft_cap"] or None
        window = self.keywords["window_left"]
        for tokens, first, length in rows:
            part = slice(token, token + tokens)
            token += tokens
            if not tokens:
                continue
            if not length:
                out[part], lse[part] = 0, -math.inf
                continue
            chosen = indices[first : first - (-length // size)].long()
            read = [half[chosen].flatten(0, 1)[:length].float() for half in (keys, values)]
            found, found_lse = dense_attention(
                q[part].float(), read[0] * k_scale, read[1] * v_scale, scale=self.keywords["sm_scale"], causal=causal,
                sliding_window=None if window < 0 else window + 1, logits_soft_cap=cap, return_lse=True,
            )  # fmt: skip
            out[part], lse[part] = found.to(out.dtype), found_lse / math.log(2)


class Decode(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        self._made(float_workspace_buffer, kv_layout)
        self.graph, self.tensor_cores, self.backend = use_cuda_graph, use_tensor_cores, backend
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.planned = False
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            self.starts = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)

    def workspace_size(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        return self.recorder.asks, INT_WORKSPACE

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        self._plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            *deprecated_positional_args, **kwargs,
        )  # fmt: skip

    def _plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        arguments = dict(locals())
        self._record("decode.plan", arguments)
        self.keywords, self.planned, self.page_size = arguments, True, page_size
        if seq_lens is not None and not (seq_lens >= q_len_per_req).all() and q_len_per_req > 1:
            raise ValueError("kv_len >= q_len_per_req")
        if self.graph:
            assert self.buffers[0] is not None
            assert self.buffers[2] is not None
            self.buffers[0].copy_(indptr)
            self.buffers[2].copy_(last_page_len)
        else:
            self.buffers = indptr, indices, last_page_len

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        indptr, indices, last = self.buffers
        assert indptr is not None
        assert indices is not None
        assert last is not None
        count = len(last)
        each = self.keywords["q_len_per_req"]
        if len(q) != count * each:
            raise ValueError(f"q: {len(q)} rows for {count} requests of {each}")
        if each > 1 and not self.tensor_cores:
            raise ValueError("q_len_per_req > 1 needs tensor cores")
        out = torch.empty_like(q) if out is None else out
        if not out.is_contiguous():
            raise ValueError("out: not contiguous")
        found = torch.empty(q.shape[:2])
        self._attend(
            q, paged_kv_cache, _lengths([each] * count, indptr, last, self.page_size), out, found,
            causal=True, indices=indices, k_scale=k_scale or 1.0,
            v_scale=v_scale or 1.0,
        )  # fmt: skip
        return (out, found) if return_lse else out


class Prefill(_Wrapper):
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
        self.backend = backend
        self._kv_lens_buffer = torch.empty(1024, dtype=torch.int32)

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
        starts = self.keywords["qo_indptr"]
        if len(q) != int(starts[-1]):
            raise ValueError(f"q: {len(q)} rows, qo_indptr ends at {int(starts[-1])}")
        out = torch.empty_like(q) if out is None else out
        found = torch.empty(q.shape[:2])
        counts = starts.diff().tolist()
        rows = _lengths(
            counts,
            self.keywords["paged_kv_indptr"],
            self.keywords["paged_kv_last_page_len"],
            self.keywords["page_size"],
        )
        self._attend(
            q, paged_kv_cache, rows, out, found, causal=self.keywords["causal"],
            indices=self.keywords["paged_kv_indices"], k_scale=k_scale or 1.0, v_scale=v_scale or 1.0,
        )  # fmt: skip
        return (out, found) if return_lse else out


def fast_decode_plan(
    self: Decode,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    arguments = dict(locals())
    if not self.planned:
        raise RuntimeError("fast_decode_plan before a plan")
    self._record("fast_decode_plan", {**arguments, "wrapper": self})
    if q_len_per_req > 1:
        self.starts.copy_(torch.arange(len(self.starts), dtype=torch.int32) * q_len_per_req)
    self.keywords = arguments


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    peak = torch.maximum(s, s_other)
    weights = [torch.exp2(one - peak) for one in (s, s_other)]
    total = weights[0] + weights[1]
    merged = v.float() * (weights[0] / total)[..., None] + v_other.float() * (weights[1] / total)[..., None]
    v.copy_(merged.to(v.dtype))
    s.copy_(peak + torch.log2(total))


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    keys, values = kv_cache
    if kv_layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = torch.empty_like(query) if out is None else out
    for tensor in (query, block_tables, seq_lens, out):
        if not tensor.is_contiguous():
            raise ValueError(f"XQA takes no strides: {tuple(tensor.shape)} {tensor.stride()}")
    for row, length in enumerate(seq_lens.tolist()):
        chosen = block_tables[row, : -(-length // keys.shape[1])].long()
        read = [half[chosen].flatten(0, 1)[:length].float() for half in (keys, values)]
        found = dense_attention(
            query[row : row + 1].float(), *read, scale=float(bmm1_scale),
            sliding_window=None if window_left < 0 else window_left + 1,
        ) if length else torch.zeros_like(query[:1])  # fmt: skip
        out[row] = (found[0] * bmm2_scale).to(out.dtype)
    return out


def _lengths(counts: list[int], indptr: Tensor, last: Tensor, page_size: int) -> list[tuple[int, int, int]]:
    rows = []
    for count, begin, end, rest in zip(counts, indptr.tolist()[:-1], indptr.tolist()[1:], last.tolist(), strict=True):
        rows.append((count, begin, (end - begin - 1) * page_size + rest if end > begin else 0))
    return rows


def backend(recorder: Recorder | None = None, **changes: Any) -> FlashInferBackend:
    """A backend on the CPU over the stand-in: bf16, four heads over two of 64, blocks of 4."""
    made = recorder or Recorder()
    parts = [type(kind.__name__, (kind,), {"recorder": made}) for kind in (Decode, Prefill)]

    class OnCpu(FlashInferBackend):
        def library(self) -> Library:
            return Library(parts[0], parts[1], fast_decode_plan, merge_state_in_place, xqa_batch_decode_with_kv_cache)

    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 4}
    sizes |= changes
    if "spec" not in sizes:
        import attn_flashinfer

        sizes |= {"spec": attn_flashinfer.attncore_backend(), "variant": "built"}
    return OnCpu(BackendConfig(**sizes))
