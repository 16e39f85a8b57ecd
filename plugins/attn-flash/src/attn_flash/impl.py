"""A layer's attention: the cache is written by slot mapping, then a step is attended in one or two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from attn_flash.calls import Layer, attended, finished, joined, one_part
from attn_flash.cascade import CascadeStep
from attn_flash.parts import Part, cross_parts
from attn_flash.plan import Plan
from attn_flash.rows import Rows, rows_of
from attncore import AttentionImpl, AttentionType, CacheWriter, LayerFeatures
from attncore.merge import merge_attention

if TYPE_CHECKING:
    from attn_flash.backend import FlashBackend

Answer = tuple[Tensor, Tensor | None]
PLANS = 8
"""Steps for which a layer keeps its calls: those of a builder's arenas, and some that are over."""


class FlashImpl(AttentionImpl):
    """One layer's attention. It keeps views of the last cache that it was given."""

    def __init__(self, backend: FlashBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        backend.check_layer(
            sliding_window=self.sliding_window is not None,
            logits_soft_cap=self.logits_soft_cap is not None,
            alibi_slopes=self.alibi_slopes is not None,
        )
        self._fixed: dict[str, Any] = {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "alibi_slopes": backend.per_head(self.alibi_slopes),
            "sinks": backend.per_head(self.sinks),
            "causal": self.attn_type is AttentionType.DECODER,
        }
        self._flash, self._views_of, self._size = backend, backend.views, backend.config.block_size
        self._layer = backend.layer(**self._fixed)
        self._prefix_layer: Layer | None = None
        self._write = CacheWriter(self.k_scale, self.v_scale)
        self._cache: Any = None
        self._calls: dict[Plan, list[Callable[..., Any]]] = {}
        self._by_row, self._pairs = self._layer.by_row, self._layer.pairs
        if self.attn_type is AttentionType.DECODER:
            windowed = "_windowed" if self.sliding_window is not None else ""
            self._plan_name = f"_flash{backend.generation}_plan{windowed}"
        else:
            self._plan_name = "_flash_has_no_plan"  # of cross and encoder layers, which share steps with decoder layers
        self._views: tuple[Tensor, Tensor] | None = None

    def forward(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Tensor | None = None
    ) -> Tensor:
        """Write this step's keys and values, and attend, as ``attncore.AttentionImpl`` says. Nothing synchronises.

        Without ``output`` the library's own tensor is returned; ``output`` is filled by a copy. Rows beyond the
        metadata's tokens are 0. ``kv_cache`` is None in a profiling run only, else ValueError.
        """
        # What a layer costs the host beside the library's call is this, so the usual cases are kept short.
        plan: Plan | None = getattr(metadata, self._plan_name, None)
        if plan is None or kv_cache is not self._cache or not plan.good_for(metadata):
            return self._answer(query, key, value, kv_cache, metadata, output, False)[0]
        part, calls = plan.single, self._calls.get(plan)
        if query.shape[0] != plan.tokens:
            return self._answer(query, key, value, kv_cache, metadata, output, False)[0]
        if calls is None:
            if len(self._calls) >= PLANS:
                self._forget()
            parts = zip(plan.parts, plan.arguments, strict=True)
            calls = self._calls[plan] = [self._layer.bound(part, given, self._views) for (part, _), given in parts]
        if self._views is not None:
            self._write(key, value, *self._views, metadata.slot_mapping)
        if part is None:
            found = joined(self._layer, calls, plan.parts, query, (key, value))
            return found if output is None else output.copy_(found)
        call = calls[0]
        if part.entry == "packed":
            found = call(query, key, value)
        elif part.entry == "paged" or not self._by_row:
            found = call(query)
        elif part.query_len == 1:
            found = call(query.unsqueeze(1))
        else:
            found = call(query.view(*plan.shape, *query.shape[1:]))
        if self._pairs:
            found = found[0]
        if part.entry == "decode" and self._by_row:
            found = found.view_as(query) if part.query_len == 1 else found.flatten(0, 1)
        return found if output is None else output.copy_(found)

    def forward_with_lse(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``forward``, and float32 (tokens, heads): the natural logarithm of each softmax's sum, a sink included."""
        found, lse = self._answer(query, key, value, kv_cache, metadata, output, True)
        return found, _there(lse)

    def forward_cascade(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, metadata: Any, cascade: CascadeStep,
        output: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``forward`` in two passes: the shared prefix (``backend.cascade``) is read once for all who share it.

        ValueError for a layer with a window, slopes or no causal mask, whose queries do not see the prefix alike.
        """
        if self.sliding_window is not None or self.alibi_slopes is not None or not self._fixed["causal"]:
            raise ValueError("cascade: this layer has a window, slopes or no causal mask; call forward")
        caches = self._caches(kv_cache)
        self._write(key, value, *caches, metadata.slot_mapping)
        if self._prefix_layer is None:  # every query sees the whole prefix; a sink belongs to one part only
            self._prefix_layer = self._flash.layer(**{**self._fixed, "sinks": None, "causal": False})
        chosen = query.index_select(0, cascade.token_indices)
        shared = cascade.prefix_part, cascade.prefix
        first, first_lse = one_part(self._prefix_layer, chosen, (key, value), caches, *shared, None)
        rest = cascade.suffix_part, cascade.suffix
        found, lse = one_part(self._layer, query, (key, value), caches, *rest, None)
        second, second_lse = found[cascade.token_indices], _there(lse)[cascade.token_indices]
        merged, _ = merge_attention([first, second], [_there(first_lse), second_lse])
        found.index_copy_(0, cascade.token_indices, merged)
        return finished(found, len(query), metadata.num_tokens, output)

    def _answer(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Tensor | None, with_lse: bool
    ) -> Answer:
        kind = self.attn_type
        tokens: int = metadata.num_tokens
        if kind is AttentionType.DECODER:
            _check_tokens(tokens, query=query, key=key, value=value)
            caches = None if kv_cache is None else self._caches(kv_cache)
            if caches is not None:
                self._write(key, value, *caches, metadata.slot_mapping)
            if not tokens:
                return self._nothing(query, output)
            parts = self._planned(metadata).parts
            positions = metadata.positions if with_lse and self.alibi_slopes is not None else None
            # Ranks that share out a request's keys ask for its log-sum-exp; elsewhere a query sees itself at least.
            lack = with_lse and (metadata.use_cuda_graph or not metadata.host.seq_lens.all())
            lengths = metadata.seq_lens if lack else None
            found, lse = self._attended(query, (key, value), caches, parts, metadata, lengths, positions, with_lse)
        elif kind is AttentionType.ENCODER_DECODER:
            _check_tokens(tokens, query=query)
            if not tokens:
                return self._nothing(query, output)
            found, lse = self._crossed(query, key, value, kv_cache, metadata, with_lse)
        else:
            tokens = int(metadata.host.encoder_query_start_loc[-1]) if kind is AttentionType.ENCODER else tokens
            if not tokens:
                return self._nothing(query, output)
            _check_tokens(tokens, query=query, key=key, value=value)
            found, lse = self._encoded(query, key, value, metadata, tokens, with_lse)
        count = query.shape[0]
        found = finished(found, count, tokens, output)
        return found, lse if lse is None else finished(lse, count, tokens, None, -torch.inf)

    def _crossed(self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, with_lse: bool) -> Answer:
        caches = None if kv_cache is None else self._caches(kv_cache)
        if key is None:
            key = value = query.new_empty((0, self._flash.config.num_kv_heads, query.shape[2]))
        _check_tokens(int(metadata.host.encoder_query_start_loc[-1]), key=key, value=value)
        if caches is not None and len(metadata.host.cross_slot_mapping):
            self._write(key, value, *caches, metadata.cross_slot_mapping)
        parts = [
            (part, rows_of(metadata, part, cross=True)) for part in cross_parts(metadata, cached=caches is not None)
        ]
        lack = metadata.use_cuda_graph or not metadata.host.encoder_seq_lens.all()
        lengths = metadata.encoder_seq_lens if lack else None
        return self._attended(query, (key, value), caches, parts, metadata, lengths, None, with_lse)

    def _attended(
        self, query: Tensor, fresh: tuple[Any, Any], caches: Any, parts: Any, metadata: Any, lengths: Tensor | None,
        positions: Any, with_lse: bool,
    ) -> Answer:  # fmt: skip
        """All parts; ``lengths``, int32 on the device, are given where rows may have no keys. Where the library does
        not take such rows they are lent one key, and their answers taken back.
        """
        takes = self._layer.rows_without_keys
        if lengths is None or all(part.entry in takes for part, _ in parts):
            return attended(self._layer, query, fresh, caches, parts, positions, with_lse)
        some = [(part, rows if part.entry in takes else _lent(rows)) for part, rows in parts]
        found, lse = attended(self._layer, query, fresh, caches, some, positions, with_lse)
        tokens = metadata.token_to_req_indices
        empty, count = (lengths == 0)[tokens], len(tokens)
        found[:count] = found[:count].masked_fill(empty[:, None, None], 0.0)
        if lse is not None:
            sinks = self._fixed["sinks"]
            nothing = torch.full_like(lse[0], -torch.inf) if sinks is None else sinks
            lse[:count] = torch.where(empty[:, None], nothing, lse[:count])
        return found, lse

    def _encoded(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any, tokens: int, with_lse: bool) -> Answer:
        """Tokens of a row among themselves."""
        if self.attn_type is AttentionType.ENCODER:
            starts, longest = metadata.encoder_query_start_loc, metadata.max_encoder_seq_len
        else:
            starts, longest = metadata.query_start_loc, metadata.max_query_len
            if metadata.host.context_lens.any():
                raise ValueError("metadata: a row has context; a layer of type encoder_only takes whole prompts")
        part = Part("packed", 0, len(starts) - 1, 0, tokens, 0, longest, longest)
        rows = Rows(starts, starts, starts, starts, starts)  # of which a packed call reads where its rows start
        return attended(self._layer, query, (key, value), None, [(part, rows)], None, with_lse)

    def _nothing(self, query: Tensor, output: Tensor | None) -> Answer:
        """The answer of a step without tokens."""
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        return finished(query.new_empty((0, *query.shape[1:])), len(query), 0, output), lse

    def _forget(self) -> None:
        """Drops the calls of steps with prefills, each of which was one step's; where there are none, all."""
        lasting = {plan: calls for plan, calls in self._calls.items() if plan.step is None}
        self._calls = lasting if len(lasting) < PLANS else {}

    def _caches(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        if self._views is None or kv_cache is not self._cache:
            self._views, self._cache = self._views_of(kv_cache), kv_cache
            self._calls = {}  # they are bound to the old one, which nothing may keep
        return self._views

    def _planned(self, metadata: Any) -> Plan:
        """The step's plan: the one that lies beside the metadata, or a new one."""
        plan: Plan | None = getattr(metadata, self._plan_name, None)
        if plan is None or not plan.good_for(metadata):
            plan = Plan(metadata, self._size, self._layer, self.sliding_window is not None)
            setattr(metadata, self._plan_name, plan)
        return plan


def _check_tokens(tokens: int, **tensors: Tensor) -> None:
    """ValueError where a kernel would read beyond a tensor."""
    for name, tensor in tensors.items():
        if len(tensor) < tokens:
            raise ValueError(f"{name}: {len(tensor)} tokens found; the metadata has {tokens}")


def _there(lse: Tensor | None) -> Tensor:
    if lse is None:
        raise RuntimeError("lse: asked for, and the library's function returned none")
    return lse


def _lent(rows: Rows) -> Rows:
    """The rows with one key at least, of block 0 where they have none."""
    table = rows.table if rows.table.shape[1] else rows.table.new_zeros((len(rows.table), 1))
    lengths = rows.lengths.clamp(min=1)
    sums = rows.sums.new_zeros(rows.sums.shape)
    torch.cumsum(lengths, 0, out=sums[1:])
    return rows._replace(table=table, lengths=lengths, sums=sums)
