"""The variant ``triton``: every type of attention, by the plugin's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_rocm.base import RocmBackend, RocmImpl, check_given
from attn_rocm.launch import LOG2E, Keys, Launcher, Scoring
from attncore import AttentionBackend, AttentionMetadata, AttentionType, BackendConfig
from attncore.ops import check_cross_rows


class TritonImpl(RocmImpl):
    """One layer by the plugin's own kernels. See ``attncore.AttentionImpl.forward`` for what the arguments are."""

    backend: TritonBackend

    def __init__(self, backend: AttentionBackend, layer_name: str, **given: Any) -> None:
        super().__init__(backend, layer_name, **given)

        self.scoring = Scoring(
            scale=self.scale,
            window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            slopes=None if self.slopes is None else self.slopes * LOG2E,
            sinks=self.head_sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            causal=self.attn_type is AttentionType.DECODER,
        )

    def scales_changed(self) -> None:
        super().scales_changed()
        self.scoring = replace(self.scoring, k_scale=self.k_scale, v_scale=self.v_scale)

    def forward(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> Tensor:
        if write is not True:
            write = self.check_write(write)
        output = self.checked(query, key, value, kv_cache, metadata, output)
        self._attend(query, key, value, kv_cache, metadata, output, None, write=write)
        return output

    def forward_with_lse(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if write is not True:
            write = self.check_write(write)
        output = self.checked(query, key, value, kv_cache, metadata, output)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        self._attend(query, key, value, kv_cache, metadata, output, lse, write=write)
        return output, lse

    def _attend(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor,
        lse: Tensor | None,
        *,
        write: bool,
    ) -> None:
        if self.attn_type is AttentionType.DECODER:
            keys = self._own_keys(key, value, kv_cache, metadata, write=write)
        elif self.attn_type is AttentionType.ENCODER_DECODER:
            keys = self._encoders_keys(key, value, kv_cache, metadata, write=write)
        else:
            encoder = self.attn_type is AttentionType.ENCODER
            starts = metadata.encoder_query_start_loc if encoder else metadata.query_start_loc
            longest = metadata.max_encoder_seq_len if encoder else metadata.max_query_len
            keys = _fresh_keys(starts, longest, key, value, starts)
            self.backend.launcher(query, output, lse, starts, keys, self.scoring, most_queries=longest)
            return
        self.launch(query, output, metadata, keys, lse)

    def launch(
        self, query: Tensor, output: Tensor, metadata: AttentionMetadata, keys: Keys, lse: Tensor | None = None
    ) -> None:
        """Attention of a step's queries, or a view's, over ``keys`` by the kernels."""
        self.backend.launcher(
            query, output, lse, metadata.query_start_loc, keys, self.scoring, most_queries=metadata.max_query_len,
            # Rows without a token may stand among prefills; else they are padding, and come last.
            one_token_each=metadata.max_query_len == 1 and not metadata.num_prefills,
        )  # fmt: skip

    def cached_keys(self, kv_cache: Any, metadata: AttentionMetadata) -> Keys:
        """All keys of a step in the cache."""
        return Keys(metadata.seq_lens, metadata.max_seq_len, *self.caches(kv_cache), metadata.block_table)

    def _own_keys(self, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata, *, write: bool) -> Keys:
        """Of a decoder: written to the cache, and read there but for prompts of the list builder.

        Those may have no table, and slots that a window masked, so that their own keys are taken as they came.
        """
        table, lengths, longest = metadata.block_table, metadata.seq_lens, metadata.max_seq_len
        starts = metadata.query_start_loc
        several = metadata.max_query_len > 1
        masks, span_ends = (_optional(metadata, name) if several else None for name in ("tree_mask", "span_ends"))
        if kv_cache is None:
            return _fresh_keys(lengths, longest, key, value, starts, masks, span_ends)
        caches = self.written(key, value, kv_cache, metadata.slot_mapping, write=write)
        if not table.shape[1]:
            if metadata.num_tokens:
                check_given(key, value)
            return _fresh_keys(lengths, longest, key, value, starts, masks, span_ends)
        if masks is not None or span_ends is not None:
            return Keys(lengths, longest, *caches, table, tree_mask=masks, span_ends=span_ends)
        if metadata.from_groups and metadata.num_prefills:
            left_out = _left_out(metadata) if self.sliding_window is not None and not write else False
            if key is None and not write:
                if left_out:
                    check_given(None, None)
                return Keys(_of_tables(metadata), longest, *caches, table)
            check_given(key, value)
            raw = metadata.num_prefills
            if left_out is not False:  # tokens that the builder's window left out are in no slot
                slots, scales = metadata.slot_mapping, (self.k_scale, self.v_scale)
                key, value = map(_held_or_given, (key, value), caches, scales, (slots, slots))
                return Keys(lengths, longest, *caches, table, key, value, starts, raw)
            return Keys(lengths, longest, *caches, table, key, value, starts, raw, written=not write)
        return Keys(lengths, longest, *caches, table)

    def _encoders_keys(self, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata, *, write: bool) -> Keys:
        """Of a cross layer: an encoder's, written to the cache in the step that brings them."""
        check_cross_rows(metadata, len(metadata.encoder_seq_lens))
        table, lengths, longest = metadata.cross_block_table, metadata.encoder_seq_lens, metadata.max_encoder_seq_len
        starts = metadata.encoder_query_start_loc
        if kv_cache is None:
            return _fresh_keys(lengths, longest, key, value, starts)
        slots = metadata.cross_slot_mapping
        if len(slots) and (write or metadata.from_groups):  # prompts of the list builder have no table
            check_given(key, value)
        caches = self.written(key, value, kv_cache, slots, write=write and key is not None)
        if not table.shape[1]:
            return _fresh_keys(lengths, longest, key, value, starts)
        if metadata.from_groups and key is not None:  # prompts have no row in the table
            return Keys(lengths, longest, *caches, table, key, value, starts, len(starts) - 1)
        return Keys(lengths, longest, *caches, table)


def _optional(metadata: AttentionMetadata, name: str) -> Tensor | None:
    """A field that steps may lack, asked for once a step: where there is none, asking costs as much as a launch."""
    kept = metadata.kept
    if name not in kept:
        kept[name] = getattr(metadata, name, None)
    found: Tensor | None = kept[name]
    return found


def _held_or_given(given: Tensor, cache: Tensor, scale: float | Tensor, slots: Tensor) -> Tensor:
    """The step's keys or values (tokens, kv heads, size) as the cache holds them, ``given`` where a slot is below 0."""
    places = slots.clamp(min=0)
    blocks, rows = torch.div(places, cache.shape[1], rounding_mode="floor"), places % cache.shape[1]
    if cache.element_size() == 1:  # torch indexes no fp8
        held = cache.view(torch.uint8)[blocks, rows].view(cache.dtype).to(torch.float32)
        held = held * (scale if isinstance(scale, float) else scale.view(-1, 1))
    else:
        held = cache[blocks, rows]
    return torch.where((slots >= 0)[:, None, None], held.to(given.dtype), given[: len(slots)])


def _left_out(metadata: AttentionMetadata) -> bool | None:
    """Whether a window of the list builder left tokens of a prompt out of the cache; None where the host does not know.
    Found once a step.
    """
    kept = metadata.kept
    if "left_out" not in kept:
        kept["left_out"] = _finds_left_out(metadata)
    found: bool | None = kept["left_out"]
    return found


def _finds_left_out(metadata: AttentionMetadata) -> bool | None:
    """By the groups, and for a view, or a step from another rank, by slots, which those may lack."""
    source = getattr(metadata, "source", None)
    if source is None:
        slots = getattr(metadata.host, "slot_mapping", None)
        return None if slots is None else bool((slots[: metadata.num_prefill_tokens] < 0).any())
    window = source.builder.sliding_window
    return window is not None and any(
        sequence.context_len < sequence.query_len - window
        for group in source.groups if group.is_prompt for sequence in group.sequences
    )  # fmt: skip


def _of_tables(metadata: AttentionMetadata) -> Tensor:
    """The keys of each row of a step of the list builder that brings none: those that its row of the table shows. A
    prompt without context has none there, but zeros, which are another request's block; ValueError where the host knows
    of one: by the groups, and for a view, or a step from another rank, by contexts, which those may lack.
    """
    source = getattr(metadata, "source", None)
    if source is None:
        contexts = getattr(metadata.host, "context_lens", None)
        known = contexts is None or bool(contexts[: metadata.num_prefills].all())
    else:
        prompts = (group for group in source.groups if group.is_prompt)
        known = all(sequence.context_len for group in prompts for sequence in group.sequences)
    if not known:
        check_given(None, None)
    lengths = metadata.seq_lens.clone()
    rows, counts = lengths[: metadata.num_prefills], metadata.query_start_loc.diff()[: metadata.num_prefills]
    rows.masked_fill_(rows == counts, 0)
    return lengths


def _fresh_keys(
    lengths: Tensor, longest: int, key: Any, value: Any, starts: Tensor, masks: Tensor | None = None,
    span_ends: Tensor | None = None,
) -> Keys:  # fmt: skip
    """This step's keys alone: there is no cache, or nothing is in it."""
    return Keys(
        lengths, longest, key=key, value=value, raw_starts=starts, raw_rows=0 if key is None else len(starts) - 1,
        tree_mask=masks, span_ends=span_ends,
    )  # fmt: skip


class TritonBackend(RocmBackend):
    """The variant ``triton``: every type of attention, by the plugin's own kernels."""

    impl_class = TritonImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.launcher = Launcher(config.num_heads, config.num_kv_heads, config.head_size, self.arch, self.units)
