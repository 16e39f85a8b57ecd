"""Latent attention of the stand-in: the wrapper and the rows of its plans, with the signatures of FlashInfer.

What it refuses is what FlashInfer refuses. A plan is written to memory, and read there by the module's ``run``, which
checks nothing; pages are read where the graph's buffer is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from flashinfer_standin_wrapper import Recorder
from torch import Tensor

from attncore.dense import dense_attention

_PLACE = 1 << 14  # bytes of each of a plan's arrays


class Rows(NamedTuple):
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor


def csr(qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> Rows:
    return Rows(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class Module:
    """The compiled module of a wrapper: it plans to memory that it is given, and runs what lies there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def plan(
        self, workspace: Tensor, ints: Tensor, pinned: Tensor, starts: Tensor, indptr: Tensor, lens: Tensor,
        num_heads: int, head_dim_o: int, causal: bool,
    ) -> list[int]:  # fmt: skip
        count = len(lens)
        rows = {"starts": starts.clone(), "indptr": indptr.clone(), "lens": lens.clone()}
        self._recorder.calls.append(("latent.replan", {**rows, "causal": causal}))
        for place, array in enumerate((starts, indptr, lens)):
            ints[place * _PLACE : place * _PLACE + 4 * len(array)] = array.contiguous().view(torch.uint8)
        cluster = 2 if int(starts[-1]) * num_heads // count > 64 else 1
        return [cluster, count]

    def run(
        self, workspace: Tensor, ints: Tensor, info: list[int], q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor,
        indices: Tensor, out: Tensor, lse: Tensor | None, mask: int, num_heads: int, page_size: int, scale: float,
        base_on_e: bool, ckv_scale: float, kpe_scale: float, scales: Any,
    ) -> None:  # fmt: skip
        assert not base_on_e
        self._recorder.calls.append(("latent.run", {"num_heads": num_heads, "has_lse": lse is not None}))
        count = info[1]
        starts, indptr, lens = (
            ints[place * _PLACE : place * _PLACE + 4 * size].view(torch.int32).tolist()
            for place, size in enumerate((count + 1, count + 1, count))
        )
        for row, length in enumerate(lens):
            part = slice(starts[row], starts[row + 1])
            if part.start == part.stop:
                continue
            if length:
                chosen = indices[indptr[row] : indptr[row] - (-length // page_size)].long()
                values = ckv.float()[chosen].flatten(0, 1)[:length, None] * ckv_scale
                keys = torch.cat((values, kpe.float()[chosen].flatten(0, 1)[:length, None] * kpe_scale), dim=2)
                query = torch.cat((q_nope[part], q_pe[part]), dim=2).float()
                found, found_lse = dense_attention(query, keys, values, scale=scale, causal=mask == 1, return_lse=True)
                out[part] = found.to(out.dtype)
            else:
                out[part], found_lse = 0, torch.full(q_nope[part].shape[:2], -math.inf)
            if lse is not None:
                lse[part] = found_lse / math.log(2)


class Latent:
    recorder: Recorder
    shows_its_module = True

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer, self.graph, self.backend = float_workspace_buffer, use_cuda_graph, backend
        self.buffers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self._ints = torch.zeros(3 * _PLACE, dtype=torch.uint8)
        self._module = Module(self.recorder)
        self.planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: Any = None,
        kv_cache_layout: Any = None,
        lse_mode: Any = "none",
        output_dtype: Any = None,
        output_scale: Any = "none",
        scale_mode: Any = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.recorder.calls.append(("latent.plan", {**arguments, "wrapper": self}))
        _check(metadata, page_size, num_heads)
        starts, indptr, indices, lens = metadata
        if self.graph:
            for buffer, given in zip(self.buffers, metadata, strict=True):
                if buffer is None or buffer.dtype != torch.int32:
                    raise ValueError("CUDA graph mode requires reserved buffers")
                if buffer is not self.buffers[2] and buffer.shape != given.shape:
                    raise ValueError("CUDA graph reserved buffer has incompatible capacity")
        info = self._module.plan(
            self._float_workspace_buffer, self._ints, self._ints, starts, indptr, lens, num_heads or 0,
            head_dim_ckv or 0, bool(causal),
        )  # fmt: skip
        if self.planned and self.graph and info != self._info:
            raise RuntimeError("the plan of a captured size has changed")
        self._info, self.planned = info, arguments
        self._indices = self.buffers[2] if self.graph else indices
        if self.shows_its_module:
            self._cached_module, self._int_workspace_buffer = self._module, self._ints
            self._pin_memory_int_workspace_buffer, self._plan_info = self._ints, info
            self._kv_indices_buf = self._indices

    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        planned, size_v = self.planned, self.planned["head_dim_ckv"]
        if (planned["lse_mode"] != "none") != return_lse:
            raise ValueError("MLA planned run argument LSE mode mismatch")
        is_fp8 = planned["kv_data_type"] == torch.float8_e4m3fn
        if is_fp8 != (ckv_scale is not None) or is_fp8 != (kpe_scale is not None):
            raise ValueError("ckv_scale and kpe_scale are required of fp8, and of nothing else")
        if query.dim() != 3 or kv_cache.dim() != 3 or query.dtype != planned["q_data_type"]:
            raise ValueError("packed query and KV cache must have rank 3")
        if kv_cache.dtype != planned["kv_data_type"]:
            raise ValueError(f"KV cache.dtype={kv_cache.dtype} does not match the planned one")
        if any(stride % 8 for stride in query.stride()[:-1]) or query.data_ptr() % 16:
            raise ValueError("query: rows that no kernel loads")
        out = query.new_empty((*query.shape[:2], size_v)) if out is None else out
        lse = torch.empty(query.shape[:2]) if lse is None else lse
        if out.shape != (*query.shape[:2], size_v) or lse.shape != query.shape[:2]:
            raise ValueError("Invalid shape of out or lse")
        starts = self._ints[: 4 * self._info[1] + 4].view(torch.int32)
        if len(query) < starts[-1]:
            raise ValueError(f"query: {len(query)} rows, {int(starts[-1])} planned")
        parts = query[..., :size_v], query[..., size_v:], kv_cache[..., :size_v], kv_cache[..., size_v:]
        self._module.run(
            self._float_workspace_buffer, self._ints, self._info, *parts, self._indices, out, lse,
            int(planned["causal"]), planned["num_heads"], planned["page_size"], planned["sm_scale"], False,
            float(ckv_scale or 1.0), float(kpe_scale or 1.0), None,
        )  # fmt: skip
        return (out, lse) if return_lse else out


def _check(rows: Rows, page_size: int | None, num_heads: int | None) -> None:
    """What FlashInfer refuses of the rows of a plan."""
    starts, indptr, indices, lens = rows
    for name, array in rows._asdict().items():
        if array.dtype != torch.int32 or array.dim() != 1 or not array.is_contiguous():
            raise ValueError(f"{name} metadata must be int32 and contiguous")
    if not len(lens) or len(indptr) != len(lens) + 1 or len(starts) != len(lens) + 1:
        raise ValueError("CSR metadata batch dimensions must agree")
    if int(starts[0]) or int(indptr[0]) or bool((starts.diff() < 0).any()) or bool((indptr.diff() < 0).any()):
        raise ValueError("metadata must start at zero and be nondecreasing")
    if int(indptr[-1]) > len(indices):
        raise ValueError("kv_indices metadata has too few entries")
    assert page_size
    if not torch.equal(-(-lens // page_size), indptr.diff()):
        raise ValueError("CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")
    assert num_heads
    if 128 % num_heads:
        raise ValueError("MLA causal tile boundary is unsupported")
