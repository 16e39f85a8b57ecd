"""A layer's attention: the cache is written by slot mapping, then the step is attended as its plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from attn_flash.cascade import CascadeStep
from attn_flash.generation2 import Call
from attn_flash.generations import Layer
from attn_flash.plan import LASTING, Caches, DecoderPlans, StepPlan
from attn_flash.segments import cross_segments, packed_segment
from attncore import AttentionImpl, AttentionMetadata, AttentionType, CacheWriter, LayerFeatures
from attncore.merge import merge_attention
from attncore.ops import check_cross_rows

if TYPE_CHECKING:
    from attn_flash.backend import FlashBackend

_ANEW = object()
OutputAndLse = tuple[Tensor, Tensor | None]


class FlashImpl(AttentionImpl):
    """One layer's attention. It keeps views of the last cache that it was given."""

    values_in_keys = False
    """Whether the values are a part of the keys: ``value`` is not read."""

    def __init__(self, backend: FlashBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        backend.check_layer(
            self.attn_type,
            sliding_window=self.sliding_window is not None,
            logits_soft_cap=self.logits_soft_cap is not None,
            alibi_slopes=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
        )
        self._fixed: dict[str, Any] = {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "alibi_slopes": backend.per_head(self.alibi_slopes),
            "sinks": backend.per_head(self.sinks),
            "causal": self.attn_type is AttentionType.DECODER,
        }
        self._descales: Tensor | None = None  # of queries, keys and values, for each head of an fp8 cache
        if backend.config.kv_cache_dtype.startswith("fp8"):
            shape = 3, backend.config.num_kv_heads
            with torch.inference_mode(False):  # or it could not be written to later
                self._descales = torch.ones(shape, dtype=torch.float32, device=backend.config.device)
            self._fixed["descales"] = self._descales
        self._flash = backend
        self._size_v = backend.config.head_size_v or backend.config.head_size
        self._layer: Layer = backend.layer(**self._fixed)
        self._prefix_layer: Layer | None = None
        self._cache: Any = None
        self._views: Caches = None
        self._write: Callable[[Any, Any, Tensor], None]
        self.scales_changed()
        self._find_place: Callable[[], Any] = _nowhere
        self._place: Any = None
        self._plans: DecoderPlans | None = None  # cross and encoder layers, which share steps with decoder layers
        self._reading_plans: DecoderPlans | None = None
        if self.attn_type is AttentionType.DECODER:
            windowed = self.sliding_window is not None
            self._plans = backend.plans(windowed=windowed)
            self._reading_plans = backend.plans(windowed=windowed, write=False)
        self._calls: dict[StepPlan, tuple[Call, ...]] = {}

    def forward(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        output: Tensor | None = None, *, write: bool = True,
    ) -> Tensor:  # fmt: skip
        """Write this step's keys and values, and attend, as ``attncore.AttentionImpl`` says. Nothing synchronises.

        Without ``output`` the library's own tensor is returned; ``output`` is filled by a copy. Rows beyond the
        metadata's tokens are 0. ``kv_cache`` is None in a profiling run only, else ValueError.
        """
        # What a layer costs the host beside the library's call is this, so the usual cases are kept short.
        if write is not True:
            write = self.check_write(write)
        plans = self._plans if write else self._reading_plans
        try:
            plan = None if plans is None else metadata.kept.get(plans) or plans.reused(metadata)
        except AttributeError:
            self.check_order(query, metadata)
            raise
        if (
            plan is None or kv_cache is not self._cache or query.shape[0] != plan.num_tokens
            or self._find_place() != self._place
        ):  # fmt: skip
            return self._attend(query, key, value, kv_cache, metadata, output, with_lse=False, write=write)[0]
        calls = self._calls.get(plan) or self._bound(plan)
        if not write:
            self._check_given(plan, key, value)
        elif self._views is not None:
            self._write(key, key if self.values_in_keys else value, metadata.slot_mapping)
        found = calls[0](query, key, value) if plan.single else plan.attend(calls, query, key, value)
        return found if output is None else output.copy_(found)

    def scales_changed(self) -> None:
        """See the base class. What the calls read is written to in place, where captured graphs find it."""
        self._writer = CacheWriter() if self.values_in_keys else CacheWriter(self.k_scale, self.v_scale)
        if self._views is not None:
            self._write = self._writer.into(*self._views)
        if self._descales is not None:
            for held, scale in zip(self._descales[1:], (self.k_scale, self.v_scale), strict=True):
                held.copy_(scale) if isinstance(scale, Tensor) else held.fill_(scale)

    def sinks_changed(self) -> None:
        """See the base class."""
        self._layer.sinks_changed()

    def forward_with_lse(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        output: Tensor | None = None, *, write: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``forward``, and float32 (tokens, heads): the natural logarithm of each softmax's sum, a sink included."""
        found, lse = self._attend(query, key, value, kv_cache, metadata, output, with_lse=True, write=write)
        if lse is None:
            raise RuntimeError("lse: asked for, and the library's function returned none")
        return found, lse

    def forward_cascade(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        cascade: CascadeStep, output: Tensor | None = None, *, write: bool = True,
    ) -> Tensor:  # fmt: skip
        """``forward`` in two passes: the shared prefix (``backend.cascade``) is read once for all who share it.

        Both passes read the cache, so that without ``write`` key and value are not read, and may be None.

        ValueError for a layer with a window, slopes or no causal mask, whose queries do not see the prefix alike, and
        where ``query`` or the step has fewer tokens than ``cascade`` was made of.
        """
        if self.sliding_window is not None or self.alibi_slopes is not None or not self._fixed["causal"]:
            raise ValueError("cascade: this layer has a window, slopes or no causal mask; call forward")
        write = self.check_write(write)
        self.check_order(query, metadata)
        check_tokens(metadata.num_tokens, query=query)
        if cascade.suffix.stop > metadata.num_tokens:
            raise ValueError(f"cascade: num_tokens {cascade.suffix.stop} found; the metadata has {metadata.num_tokens}")
        caches = self._views_of_cache(kv_cache)
        if write:
            self._write(key, key if self.values_in_keys else value, metadata.slot_mapping)
        if self._prefix_layer is None:  # every query sees the whole prefix; a sink belongs to one part only
            self._prefix_layer = self._flash.layer(**{**self._fixed, "sinks": None, "causal": False})
        chosen = query.index_select(0, cascade.token_indices)
        first, first_lse = self._prefix_layer.with_lse(cascade.prefix, caches, (chosen, key, value), None)
        found, lse = self._layer.with_lse(cascade.suffix, caches, (query, key, value), None)
        second, second_lse = found[cascade.token_indices], lse[cascade.token_indices]
        merged, _ = merge_attention([first, second], [first_lse, second_lse])
        found.index_copy_(0, cascade.token_indices, merged)
        return _padded(found, len(query), metadata.num_tokens, output)

    def _attend(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata, output: Tensor | None,
        *, with_lse: bool, write: bool,
    ) -> OutputAndLse:  # fmt: skip
        """``forward`` of any layer and step: arguments are checked, padding is filled."""
        write = self.check_write(write) or kv_cache is None
        self.check_order(query, metadata)
        encoder = self.attn_type is AttentionType.ENCODER
        num_tokens = int(metadata.host.encoder_query_start_loc[-1]) if encoder else metadata.num_tokens
        if not num_tokens:
            lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
            return _padded(query.new_empty((0, query.shape[1], self._size_v)), len(query), 0, output), lse
        check_tokens(num_tokens, query=query)
        caches: Caches = None
        lengths: Tensor | None = None
        plans = self._plans if write else self._reading_plans
        if plans is not None:
            if write:
                self._check_new(num_tokens, key, value)
                caches = self._written(key, value, kv_cache, metadata.slot_mapping)
            else:
                caches = self._views_of_cache(kv_cache)
            plan: StepPlan = plans.plan(metadata, self._layer)
            if not write:
                self._check_given(plan, key, value)
            # Ranks that share out a request's keys ask for its log-sum-exp; elsewhere a query sees itself at least.
            if with_lse and (metadata.use_cuda_graph or not metadata.host.seq_lens.all()):
                lengths = metadata.seq_lens
        elif self.attn_type is AttentionType.ENCODER_DECODER:
            check_cross_rows(metadata, len(metadata.encoder_seq_lens))
            num_keys = int(metadata.host.encoder_query_start_loc[-1])
            if key is None and (not write or not num_keys):
                key = value = query.new_empty((0, self._flash.config.num_kv_heads, query.shape[2]))
            if write:
                check_tokens(num_keys, key=key, value=value)
                caches = self._written(key, value, kv_cache, metadata.cross_slot_mapping)
            else:
                caches = self._views_of_cache(kv_cache)
            no_table = not metadata.cross_block_table.shape[1] and metadata.host.encoder_seq_lens.any()
            in_cache = caches is not None and not no_table
            plan = StepPlan(cross_segments(metadata, cached=in_cache))
            if plan.packed:
                check_tokens(num_keys, key=key, value=value)
            if metadata.use_cuda_graph or not metadata.host.encoder_seq_lens.all():
                lengths = metadata.encoder_seq_lens
        else:
            check_tokens(num_tokens, key=key, value=value)
            plan = self._plan_of_encoder(metadata, num_tokens)
        found, found_lse = self._attend_planned(plan, (query, key, value), caches, metadata, lengths, with_lse)
        found = _padded(found, len(query), num_tokens, output)
        if found_lse is None:
            return found, None
        return found, _padded(found_lse, len(query), num_tokens, None, -torch.inf)

    def _attend_planned(
        self, plan: StepPlan, tensors: tuple[Tensor, Any, Any], caches: Caches, metadata: AttentionMetadata,
        lengths: Tensor | None, with_lse: bool,
    ) -> OutputAndLse:  # fmt: skip
        """All segments; ``lengths``, int32 on the device, are given where rows may have no keys. Where the library does
        not take such rows they are lent one key, and their answers taken back.
        """
        lent = None if lengths is None else plan.with_a_key_each(self._layer)
        plan = lent or plan
        query, key, value = plan.without_padding(tensors[0]), *tensors[1:]
        lse: Tensor | None = None
        if with_lse:
            sloped = self.alibi_slopes is not None and self.attn_type is AttentionType.DECODER
            places = _places_of_queries(metadata) if sloped else None
            found, lse = plan.attend_with_lse(self._layer, caches, (query, key, value), places)
        else:
            found = plan.attend(plan.bound(self._layer, caches), query, key, value)
        if lent is not None and lengths is not None:
            rows = metadata.token_to_req_indices
            empty, count = torch.eq(lengths, 0)[rows], len(rows)
            found[:count] = found[:count].masked_fill(empty[:, None, None], 0.0)
            if lse is not None:
                sinks = self._fixed["sinks"]
                nothing = torch.full_like(lse[0], -torch.inf) if sinks is None else sinks
                lse[:count] = torch.where(empty[:, None], nothing, lse[:count])
        return found, lse

    def _plan_of_encoder(self, metadata: AttentionMetadata, num_tokens: int) -> StepPlan:
        """Tokens of a row among themselves."""
        if self.attn_type is AttentionType.ENCODER:
            starts, longest = metadata.encoder_query_start_loc, metadata.max_encoder_seq_len
            ends = metadata.host.encoder_query_start_loc
        else:
            starts, longest = metadata.query_start_loc, metadata.max_query_len
            ends = metadata.host.query_start_loc
            if metadata.host.context_lens.any():
                raise ValueError("metadata: a row has context; a layer of type encoder_only takes whole prompts")
        return StepPlan([packed_segment(starts, num_tokens, longest, int(ends[-1]))])

    def _bound(self, plan: StepPlan) -> tuple[Call, ...]:
        """The layer's calls for a plan, which it keeps. Those of steps with prefills, each of which was one step's, are
        dropped where there are many; where there are none, all.
        """
        if len(self._calls) >= LASTING:
            lasting = {kept: calls for kept, calls in self._calls.items() if kept.lasts}
            self._calls = lasting if len(lasting) < LASTING else {}
        calls = self._calls[plan] = plan.bound(self._layer, self._views)
        return calls

    def _written(self, key: Any, value: Any, kv_cache: Any, slots: Tensor) -> Caches:
        """Views of the cache, to which the step's keys and values were written; None without a cache."""
        if kv_cache is None:
            return None
        caches = self._views_of_cache(kv_cache)
        if len(slots):
            self._write(key, key if self.values_in_keys else value, slots)
        return caches

    def _check_given(self, plan: StepPlan, key: Tensor | None, value: Tensor | None) -> None:
        """ValueError where a step that writes nothing has rows whose keys are not in the cache, and are not given."""
        if plan.packed:
            self._check_new(plan.num_tokens, key, value)

    def _check_new(self, num_tokens: int, key: Tensor | None, value: Tensor | None) -> None:
        """ValueError where a causal layer's keys or values of a step are not all given."""
        check_tokens(num_tokens, key=key, value=value)

    def _views_of_cache(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        if self._views is None or kv_cache is not self._cache or self._find_place() != self._place:
            # A list may hold other tensors the next time: it is never taken for the cache that is known. A tensor may
            # be given other memory (``set_``, ``data``), where its views stay.
            views, known = self._views_of(kv_cache), _ANEW if isinstance(kv_cache, list) else kv_cache
            write, find_place = self._writer.into(*views), _finder(known)
            self._cache = _ANEW  # until all is of this one: an interrupt may come in between
            self._views, self._write = views, write
            self._find_place, self._place = find_place, find_place()
            self._calls = {}  # they are bound to the old one, which nothing may keep
            self._cache = known
            return views
        return self._views

    def _views_of(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """What keys and values are written to, and the layer's calls are bound to."""
        return self._flash.kv_cache_views(kv_cache)


def _places_of_queries(metadata: AttentionMetadata) -> Tensor:
    """int32[T]: where each token's own key stands among its row's. That is no position where a row begins within its
    request, as those of chunked local attention do.
    """
    rows, starts = metadata.token_to_req_indices, metadata.query_start_loc
    ends = starts[(rows + 1).clamp(max=len(starts) - 1)]  # padded rows of the list builder have no start of their own
    return metadata.seq_lens[rows] - ends + torch.arange(len(rows), dtype=torch.int32, device=rows.device)


def _finder(kv_cache: Any) -> Callable[[], Any]:
    """What gives the addresses of a cache's tensors, time and again."""
    if isinstance(kv_cache, tuple):
        return lambda: [part.data_ptr() for part in kv_cache]
    found: Callable[[], Any] = _nowhere if kv_cache is _ANEW else kv_cache.data_ptr
    return found


def _nowhere() -> None:
    """The address of no cache, and of a list's."""


def _padded(found: Tensor, count: int, num_tokens: int, output: Tensor | None, fill: float = 0.0) -> Tensor:
    """``found``, of ``num_tokens`` good rows, with ``count`` rows: those beyond them are ``fill``. In ``output`` where
    that is given.
    """
    if output is None:
        if len(found) == count:
            if count > num_tokens:
                found[num_tokens:] = fill
            return found
        output = found.new_empty((count, *found.shape[1:]))
    output[:num_tokens] = found[:num_tokens]
    if count > num_tokens:
        output[num_tokens:] = fill
    return output


def check_tokens(num_tokens: int, **tensors: Tensor | None) -> None:
    """ValueError where a kernel would read beyond a tensor."""
    for name, tensor in tensors.items():
        if tensor is None or len(tensor) < num_tokens:
            found = "None" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(f"{name}: {found} found; the metadata has {num_tokens}")
