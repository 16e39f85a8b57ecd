"""The built-in backend ``reference``: paged attention in torch, on any device, in float32 arithmetic.

It is what other backends are compared with (``attncore verify``, the conformance kit), and what runs where no kernel
library does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore import kv_cache as paged
from attncore.abstract import AttentionBackend, AttentionImpl
from attncore.paged_attention import Paged, Scoring, many_requests, one_request
from attncore.reference_checks import check_forward, check_table, per_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncore.abstract import BackendConfig

#: Requests with at most so many tokens in a step (decodes, drafts) are computed together; longer ones one by one.
MAX_BATCHED_QUERY = 16


class ReferenceImpl(AttentionImpl):
    """One layer's attention. See ``forward``."""

    def __init__(
        self,
        backend: AttentionBackend,
        layer_name: str,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        super().__init__(
            backend,
            layer_name,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
            if factor != 1.0:
                raise ValueError(
                    f"{name}: {factor} found; the reference backend keeps no scaled cache, so leave it at 1.0"
                )
        self._scoring = Scoring(
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=per_head("alibi_slopes", alibi_slopes, backend.config),
            sinks=per_head("sinks", sinks, backend.config),
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: Any,
        output: Tensor | None = None,
    ) -> Tensor:
        """Write this step's keys and values to the cache, and attend; returns ``(num_tokens, num_heads, head_size)``.

        ``query`` is ``(num_tokens, num_heads, head_size)``, ``key`` and ``value`` ``(num_tokens, num_kv_heads,
        head_size)``, in the backend's dtype and on one device with ``kv_cache`` and the metadata of either door; the
        result has the query's dtype and is stored in ``output`` where that is given. ``kv_cache`` may be None in a
        profiling run, whose slots are all -1.

        Request i attends over its first ``seq_lens[i]`` tokens, causally. A request without context, and one whose
        last slot is -1 (profiling), attends over this step's keys alone and needs no block table. Tokens beyond the
        last request (padding) give zeros. The host's arrays decide and the device's index, so nothing synchronises.

        Tensors that disagree are ValueErrors that name the argument.
        """
        config = self.backend.config
        caches = check_forward(config, query, key, value, kv_cache, metadata, output)
        if output is None:
            output = torch.empty_like(query)
        if caches is None:
            caches = (key[:0].unsqueeze(1), value[:0].unsqueeze(1))
        else:
            written = len(metadata.slot_mapping)
            paged.write(key[:written], value[:written], caches, metadata.slot_mapping)
        step = Paged(query, key, value, *caches, metadata.block_table)
        self._attend(step, metadata, output)
        return output

    def _attend(self, step: Paged, metadata: Any, output: Tensor) -> None:
        bounds = np.asarray(metadata.host.query_start_loc, dtype=np.int64)
        output[int(bounds[-1]) :] = 0  # padding: some engines feed it to the next layer
        rows = np.flatnonzero(np.diff(bounds))  # a padded row may have no token
        starts, ends = bounds[rows], bounds[rows + 1]
        contexts = np.asarray(metadata.host.seq_lens, dtype=np.int64)[rows] - (ends - starts)
        if contexts.size and contexts.min() < 0:
            row = rows[contexts.argmin()]
            raise ValueError(
                f"metadata: row {row} has seq_lens {metadata.host.seq_lens[row]}, fewer than its query tokens"
            )
        # Without a slot for its last token a request owns no cache: a profiling run.
        cached = (contexts > 0) & (np.asarray(metadata.host.slot_mapping)[ends - 1] >= 0)
        check_table(step, rows[cached], ends[cached] - starts[cached] + contexts[cached])
        batched = cached & (ends - starts <= MAX_BATCHED_QUERY)
        for num_queries in np.unique((ends - starts)[batched]):
            some = batched & (ends - starts == num_queries)
            many_requests(
                step,
                self._scoring,
                output,
                rows=rows[some],
                starts=starts[some],
                contexts=contexts[some],
                num_queries=int(num_queries),
            )
        for i in np.flatnonzero(~batched):
            one_request(
                step,
                self._scoring,
                output,
                row=int(rows[i]),
                start=int(starts[i]),
                end=int(ends[i]),
                context=int(contexts[i]) if cached[i] else 0,
            )


class ReferenceBackend(AttentionBackend):
    """Paged attention in torch on any device, with windows, soft caps, ALiBi, sinks and grouped queries."""

    name = "reference"
    impl_class = ReferenceImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        paged.cache_dtype(config.kv_cache_dtype, config.dtype)
        self.kv_cache_shape(1, config.block_size, config.num_kv_heads, config.head_size)
        if config.use_mla or config.head_size_v not in (None, config.head_size):
            raise ValueError(
                "head_size_v: the reference backend keeps keys and values of one size, and no latent cache"
            )

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """``(2, num_blocks, block_size, num_kv_heads, head_size)``: keys, then values."""
        return paged.cache_shape(num_blocks, block_size, num_kv_heads, head_size, self.config.kv_cache_layout)

    def copy_blocks(self, kv_caches: Sequence[Any], src_to_dst: Any) -> None:
        """Copy blocks within each layer's cache; see ``attncore.kv_cache.copy_blocks`` for the rules and errors."""
        paged.copy_blocks(kv_caches, src_to_dst)

    def swap_blocks(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copy blocks to another cache, say on the CPU; see ``attncore.kv_cache.swap_blocks``."""
        paged.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)
