"""The stand-in of flash-attn 4."""

from __future__ import annotations

from typing import Any

import torch
from flash_standin_attention import NAN, attention, check_starts, check_table, loaded_tile, read_pages
from torch import Tensor


class Generation4:
    """flash_attn.cute of flash-attn-4, as on sm_90; ``calls``: what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
        seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0,
        num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, score_mod: Any = None,
        score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
        aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
        seqlen_k_per_split: Any = None, disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: Any = None,
    ) -> Any:  # fmt: skip
        """Rows of one length (q of four dimensions) or of any, over packed keys or a paged cache."""
        self.calls.append(("varlen", {name: part for name, part in locals().items() if name != "self"}))
        check_table(page_table)
        assert page_table is None or cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16"
        check_starts(cu_seqlens_q, cu_seqlens_k, seqused_k)
        batched = q.dim() == 4
        flat = q.flatten(0, 1) if batched else q
        rows = len(q) if batched else len(cu_seqlens_q) - 1
        starts = [row * q.shape[1] for row in range(rows + 1)] if batched else cu_seqlens_q.tolist()
        found, found_lse = torch.full_like(flat, NAN), torch.full(flat.shape[:2], NAN)
        for row in range(rows):
            mine = slice(starts[row], starts[row + 1])
            if page_table is None:
                one, other = cu_seqlens_k[row : row + 2].tolist()
                keys, values, length = (*loaded_tile(one, other, k, v), other - one)
            else:
                assert len(page_table) == rows, "page_table must have a row each"
                length = int(seqused_k[row])
                if mine.start < mine.stop and not length:
                    raise RuntimeError("a row with queries and no keys: the column before its table's first is read")
                keys, values = (read_pages(part, page_table[row], length) for part in (k, v))
            assert mine.stop - mine.start <= max_seqlen_q, "longer than max_seqlen_q"
            assert length <= max_seqlen_k, "longer than max_seqlen_k"
            rest = 0.0 * values[length:].float().sum()  # weights of 0 times what lies there
            found[mine], found_lse[mine] = attention(
                flat[mine], keys[:length], values[:length], scale=softmax_scale, causal=causal, window=window_size,
                softcap=softcap, sinks=learnable_sink,
            )  # fmt: skip
            found[mine] += rest.to(found.dtype)
        if not batched:
            return found, found_lse.transpose(0, 1).contiguous() if return_lse else None
        lse = found_lse.unflatten(0, (rows, q.shape[1])).transpose(1, 2).contiguous()
        return found.view_as(q), lse if return_lse else None
