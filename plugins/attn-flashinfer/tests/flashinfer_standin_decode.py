"""Decodes of the stand-in: the wrapper, its fast plan, and XQA, with the signatures of FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
from attn_flashinfer.device_plan import Sizes, layout_of, words_that_run_reads
from flashinfer_standin_plan import PlanFacts, write_plan
from flashinfer_standin_wrapper import INT_WORKSPACE, Wrapper, row_lengths
from torch import Tensor

from attncore.dense import dense_attention


class Decode(Wrapper):
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
            self._write_plan(arguments, indptr)
        else:
            self.buffers = indptr, indices, last_page_len

    def _write_plan(self, arguments: dict[str, Any], indptr: Tensor) -> None:
        """Writes the plan of a captured size to the integer workspace, and keeps its description."""
        names = ("num_qo_heads", "num_kv_heads", "page_size", "window_left")
        each, (heads, kv_heads, page_size, window) = arguments["q_len_per_req"], (arguments[name] for name in names)
        self.facts = PlanFacts(
            len(indptr) - 1, each, heads, kv_heads, page_size, window, arguments["head_dim"], self.tensor_cores
        )
        self._plan_info = write_plan(indptr.tolist(), self.facts, self._int_workspace.numpy())

    def _is_stale(self, indptr: Tensor) -> bool:
        """Whether the plan that a run reads is another one than of the pages that it reads."""
        memory = torch.zeros_like(self._int_workspace)
        facts = self.facts
        sizes = Sizes(
            facts.num_reqs, facts.query_len, facts.num_heads, facts.num_kv_heads, facts.page_size, facts.window_left,
            facts.processors,
        )  # fmt: skip
        layout = layout_of(write_plan(indptr.tolist(), facts, memory.numpy()), sizes)
        expected, found = (words_that_run_reads(one, layout, sizes) for one in (memory, self._int_workspace))
        return any(not torch.equal(array, found[name]) for name, array in expected.items())

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
            q, paged_kv_cache, row_lengths([each] * count, indptr, last, self.page_size), out, found,
            causal=True, indices=indices, k_scale=k_scale or 1.0,
            v_scale=v_scale or 1.0,
        )  # fmt: skip
        if self.graph and self._is_stale(indptr):
            out.fill_(torch.nan)
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
    if self.graph:
        self._write_plan(arguments, indptr if global_override_indptr_cpu is None else global_override_indptr_cpu)


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
    fp8 = keys.dtype == torch.float8_e4m3fn
    if fp8:  # in which it multiplies then, the rows of a last page that hold no token by 0
        query = query.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    for row, length in enumerate(seq_lens.tolist()):
        chosen = block_tables[row, : -(-length // keys.shape[1])].long()
        pages = [half.float()[chosen].flatten(0, 1) for half in (keys, values)]
        read = [half[:length] for half in pages]
        found = dense_attention(
            query[row : row + 1].float(), *read, scale=float(bmm1_scale),
            sliding_window=None if window_left < 0 else window_left + 1, sinks=sinks,
        ) if length else torch.zeros(1, *query.shape[1:])  # fmt: skip
        unused = [(half[length:] * 0.0).sum(0).repeat_interleave(query.shape[1] // half.shape[1], 0) for half in pages]
        out[row] = (found[0] * bmm2_scale + (sum(unused) if fp8 else 0.0)).to(out.dtype)
    return out
