"""The built-in backend ``reference``: attention of every type in torch, on any device, in float32 arithmetic.

It is what other backends are compared with (``attncore verify``, the conformance kit), and what runs where no kernel
library does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from attncore.abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType, LayerFeatures
from attncore.arguments import flag
from attncore.ops.step_checks import check_device, check_host, check_query, check_tensors, num_tokens_of
from attncore.reference import cache as paged
from attncore.reference import checks
from attncore.reference.causal import Answer, CausalRows, Paged, has_tables
from attncore.reference.non_causal import CrossRows, among_themselves
from attncore.reference.scoring import Scoring

if TYPE_CHECKING:
    from collections.abc import Sequence


class ReferenceImpl(AttentionImpl):
    """One layer's attention. See ``forward``."""

    def __init__(self, backend: AttentionBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        self._scoring = Scoring(
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=checks.per_head("alibi_slopes", self.alibi_slopes, backend.config),
            sinks=checks.per_head("sinks", self.sinks, backend.config),
            causal=self.attn_type is AttentionType.DECODER,
        )

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
        """Write this step's keys and values to the cache, and attend; returns ``(num_tokens, num_heads, head_size_v)``.

        ``query`` is ``(num_tokens, num_heads, head_size)``, ``key`` ``(num_tokens, num_kv_heads, head_size)`` and
        ``value`` ``(num_tokens, num_kv_heads, head_size_v)``, in the backend's dtype and on one device with
        ``kv_cache`` and the metadata of either builder; the result has the query's dtype and is stored in ``output``
        where that is given. ``kv_cache`` may be None in a profiling run, whose slots are all -1. What other types of
        attention and latent caches take is said in docs/contract.md.

        Request i attends over its first ``seq_lens[i]`` tokens, causally; where its tokens form a draft tree
        (``tree_mask``), each over the context and its ancestors, and a token in a span (``span_ends``) over all of the
        span, too. A request without context attends over this step's keys alone and needs no block table; so does one
        of the list builder whose last slot is -1. Tokens beyond the last request (padding) give zeros. The host's
        arrays decide and the device's index, so nothing synchronises.

        Without ``write`` nothing is written, and the keys and values of tokens that have a slot, or whose row has a
        block table, are read in the cache; ``key`` and ``value``, which may be None, are for other tokens alone.

        Tensors that disagree are ValueErrors that name the argument; nothing is written then.
        """
        return self._attend(self._scoring, (query, key, value), kv_cache, metadata, output, write=write).output

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
        """``forward``, and the natural logarithm of each softmax's sum, ``(num_tokens, num_heads)`` float32.

        It is -inf for padding, and where a query sees no key: there the sink in a layer with sinks.
        """
        scoring = replace(self._scoring, with_lse=True)
        found, lse = self._attend(scoring, (query, key, value), kv_cache, metadata, output, write=write)
        assert lse is not None  # which this scoring has
        return found, lse

    def _attend(
        self,
        scoring: Scoring,
        tensors: tuple[Tensor, Any, Any],
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None,
        *,
        write: bool,
    ) -> Answer:
        config, attn_type = self.backend.config, self.attn_type
        check_host(attn_type, metadata)
        host = metadata.host
        num_tokens = num_tokens_of(attn_type, host)
        check_query(tensors[0], num_tokens[0])
        write = flag("write", write) or kv_cache is None
        key_dtype = None
        if not write:
            tensors, key_dtype = self._with_cached(tensors, kv_cache, metadata)
        query, key, value = check_tensors(config, attn_type, tensors, num_tokens, output, key_dtype)
        check_device(attn_type, metadata, query.device)
        if attn_type is AttentionType.ENCODER_ONLY:
            checks.check_whole(host)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if scoring.with_lse else None
        step = Paged(
            query, key, value, key[:0].unsqueeze(1), value[:0].unsqueeze(1), query.new_empty((0, 0)), *self._scales
        )
        if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            starts = host.query_start_loc
            requests, step = self._written(step, kv_cache, metadata, write=write)
            answer = _answer(step, output, lse)
            requests.attend(step, scoring, answer)
        else:
            encoder_only = attn_type is AttentionType.ENCODER_ONLY
            starts = host.query_start_loc if encoder_only else host.encoder_query_start_loc
            answer = _answer(step, output, lse)
            among_themselves(step, scoring, answer, np.asarray(starts, dtype=np.int64))
        answer.put_nothing(slice(int(starts[-1]), None))  # some engines feed padding to the next layer
        if output is not None and answer.output is not output:
            output.copy_(answer.output)
            answer = answer._replace(output=output)
        return answer

    def _with_cached(
        self, tensors: tuple[Tensor, Any, Any], kv_cache: Any, metadata: AttentionMetadata
    ) -> tuple[tuple[Tensor, Any, Any], torch.dtype | None]:
        """The tensors with the keys and values that the cache has of this step's tokens, where these have a slot; and
        the dtype of these: float32 of an fp8 cache, whose numbers times a scale no other dtype holds. None: the query's
        """
        crosses = self.attn_type is AttentionType.ENCODER_DECODER
        if not crosses and self.attn_type is not AttentionType.DECODER:
            return tensors, None
        config, name = self.backend.config, "cross_slot_mapping" if crosses else "slot_mapping"
        given, host_slots = tensors, np.asarray(getattr(metadata.host, name))
        caches = checks.check_cache(config, kv_cache, name, host_slots, given[0].device)
        check_device(self.attn_type, metadata, given[0].device)
        requests = None if crosses else CausalRows.of(metadata)
        missing = np.flatnonzero(host_slots < 0) if requests is None else requests.unslotted
        if caches is None:
            return tensors, None
        slots = getattr(metadata, name)
        if requests is not None and len(missing) and has_tables(metadata):
            table = metadata.block_table
            checks.check_table(caches, table, requests.rows, requests.lengths)
            places = torch.from_numpy(missing).to(slots.device, non_blocking=True)
            slots = slots.index_copy(0, places, requests.slots_of(missing, table, caches[0].shape[1]))
            missing = missing[:0]
        unslotted = len(missing) > 0
        if unslotted:
            counts = num_tokens_of(self.attn_type, metadata.host)
            given = check_tensors(config, self.attn_type, tensors, counts, None)
        rows = len(slots) if crosses else len(given[0])  # an engine pads
        found = []
        dtype = torch.float32 if caches[0].dtype.itemsize == 1 else None
        for new, cache, scale in zip(given[1:], caches, self._scales, strict=True):
            held = given[0].new_zeros((rows, *cache.shape[2:]), dtype=dtype)
            held[: len(slots)] = paged.restored(paged.read(cache, slots.clamp(min=0)), scale)
            if unslotted:
                own = new[: len(slots)].to(held.dtype)
                held[: len(slots)] = torch.where((slots >= 0)[:, None, None], held[: len(slots)], own)
            found.append(held)
        return (given[0], found[0], found[1]), dtype

    @property
    def _scales(self) -> tuple[float | Tensor, float | Tensor]:
        """Of keys and of values; latent values are keys."""
        return self.k_scale, self.k_scale if self.backend.config.use_mla else self.v_scale

    def _written(
        self, step: Paged, kv_cache: Any, metadata: AttentionMetadata, *, write: bool
    ) -> tuple[CausalRows | CrossRows, Paged]:
        """The requests, and the step with the caches, to which its keys and values have been written."""
        host, crosses = metadata.host, self.attn_type is AttentionType.ENCODER_DECODER
        slots = "cross_slot_mapping" if crosses else "slot_mapping"
        table: Tensor = metadata.cross_block_table if crosses else metadata.block_table
        caches = checks.check_cache(self.backend.config, kv_cache, slots, getattr(host, slots), step.query.device)
        requests = CrossRows.of(metadata) if crosses else CausalRows.of(metadata)
        if isinstance(requests, CausalRows):
            checks.check_shared(requests, self.sliding_window, self.alibi_slopes)
        cached = requests.cached
        checks.check_table(caches, table, requests.rows[cached], requests.lengths[cached])
        if caches is None:
            return requests, step
        checks.check_blocks(caches, table, requests.reads(self.sliding_window), step.query.device)
        if write:
            written = len(getattr(host, slots))
            paged.write(
                step.key[:written], step.value[:written], caches, getattr(metadata, slots),
                k_scale=step.k_scale, v_scale=step.v_scale,
            )  # fmt: skip
        return requests, step._replace(key_cache=caches[0], value_cache=caches[1], block_table=table)


def _answer(step: Paged, output: Tensor | None, lse: Tensor | None) -> Answer:
    """Where results go: to ``output``, or beside it where it shares memory with what is read when a part of them has
    been written.
    """
    read = {tensor.untyped_storage().data_ptr() for tensor in step[:5]}
    if output is None or output.untyped_storage().data_ptr() in read:
        output = step.query.new_empty((*step.query.shape[:2], step.value.shape[2]))
    return Answer(output, lse)


class ReferenceBackend(AttentionBackend):
    """Attention of every type in torch on any device: windows, soft caps, ALiBi, sinks, groups, latent caches."""

    name = "reference"
    impl_class = ReferenceImpl

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """``(2, num_blocks, block_size, num_kv_heads, head_size)``: keys, then values; of HND heads before tokens.

        ``attncore.reference.cache.cache_shape`` says how it is for values of another size, and for latent caches.
        """
        config = self.config
        return paged.cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, config.kv_cache_layout,
            head_size_v=config.head_size_v, use_mla=config.use_mla,
        )  # fmt: skip

    def copy_blocks(self, kv_caches: Sequence[Any], src_to_dst: Any) -> None:
        """Copy blocks within each layer's cache; see ``reference.cache.copy_blocks`` for the rules and errors."""
        paged.copy_blocks(kv_caches, src_to_dst, views=self.kv_cache_views)

    def swap_blocks(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """Copy blocks to another cache, say on the CPU; see ``attncore.reference.cache.swap_blocks``."""
        if isinstance(src_kv_cache, Tensor) != isinstance(dst_kv_cache, Tensor):  # a pair, and a whole one
            src_kv_cache, dst_kv_cache = self.kv_cache_views(src_kv_cache), self.kv_cache_views(dst_kv_cache)
        dtype = self.kv_cache_torch_dtype()
        paged.swap_blocks(_as_floats(src_kv_cache, dtype), _as_floats(dst_kv_cache, dtype), src_to_dst)


def _as_floats(kv_cache: Any, dtype: torch.dtype) -> Any:
    """A cache as floats where an engine has allocated it as bytes, whole or a pair."""
    if dtype.itemsize != 1 or not isinstance(kv_cache, Tensor | tuple | list):
        return kv_cache
    if isinstance(kv_cache, Tensor):
        return paged.as_floats(kv_cache, dtype)
    return [paged.as_floats(part, dtype) if isinstance(part, Tensor) else part for part in kv_cache]
