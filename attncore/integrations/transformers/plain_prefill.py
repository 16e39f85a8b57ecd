"""Prompts of latent attention (MLA) by keys and values of every head, beside decodes over the latent rows themselves.

Absorbed, a query and a row meet in ``2 * kv_lora_rank + qk_rope_head_dim`` products a head (1,088 of DeepSeek-V3's);
over keys and values, which have to be made of the rows first, in ``qk_nope_head_dim + qk_rope_head_dim + v_head_dim``
(320). So long prompts run plainly: their own tokens as a causal batch without context, their context in chunks that fit
a workspace, and the parts are merged. Decodes, and prompts for which it does not pay, stay absorbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attncore.arguments import integer
from attncore.builder import CommonAttentionMetadata, context_chunk_metadata, context_chunks, new_tokens_metadata
from attncore.integrations.transformers.model_layers import ModelLayer, attention_layers
from attncore.merge import merge_attention
from attncore.reference import cache as reference_cache
from attncore.registry.choice.choice import Choice
from attncore.registry.choice.select import select
from attncore.registry.host.host import Host
from attncore.registry.request import AttentionRequest

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.integrations.transformers.latent_layers import LatentLayer

LEAST_SAVED = 1 << 39
"""Products that a layer saves, of all heads, from which on a plain prefill is faster than an absorbed one."""


class PlainPrefill(NamedTuple):
    """What runs prompts of latent layers plainly. Made by ``plain_prefill``, for ``paged_caches``."""

    choice: Choice
    """The backend that attends over keys and values. It reads no cache."""
    workspace_tokens: int
    """Tokens of contexts whose keys and values are made at once."""
    least_saved: int
    """Products of one layer, of all heads, that a step must save: one that saves less runs absorbed."""


def plain_prefill(
    model: Any,
    *,
    layers: tuple[ModelLayer, ...] | None = None,
    workspace_tokens: int = 16384,
    least_saved: int = LEAST_SAVED,
    host: Host | None = None,
    **fields: Any,
) -> PlainPrefill:
    """What ``paged_caches`` takes to run the prompts of latent layers by keys and values of every head.

    ``model`` is one that ``use_latent_caches`` was called for, ``layers`` those of ``attention_layers(model)``.
    A second backend is chosen, of heads of ``qk_nope_head_dim + qk_rope_head_dim``, for the features
    ``encoder_decoder`` and ``lse``; values are padded to that size. ``fields`` are further fields of its
    AttentionRequest, such as ``backend``. Contexts are projected up ``workspace_tokens`` at once, or a block of each
    request where that is more: on the device a token takes ``4 * num_heads * head size`` bytes in 16 bits. A step saves
    products where prompts are long, and spends some on contexts that are projected up; ``least_saved`` says from which
    number on, of a layer, it runs plainly (0: wherever it saves some).

    NoBackendError where no backend can, ValueError for a model without latent caches, or whose layers differ in their
    sizes, or have windows or sinks.
    """
    workspace_tokens = integer("workspace_tokens", workspace_tokens, 1)
    least_saved = integer("least_saved", least_saved, 0, 2**63 - 1)
    layers = attention_layers(model) if layers is None else layers
    if not layers or not all(layer.use_mla for layer in layers):
        raise ValueError(
            f"model: {type(model).__name__} has layers without latent caches; call use_latent_caches(model) first, or "
            "leave plain_prefill out"
        )
    for layer in layers:
        for name in ("sliding_window", "sinks"):
            if getattr(layer, name) is not None:
                raise ValueError(f"model: layer {layer.name} has {name}; leave plain_prefill out")
    shapes = {(layer.num_heads, _Sizes.of(layer.module)) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(f"model: {type(model).__name__} has latent layers of several sizes; leave plain_prefill out")
    num_heads, sizes = shapes.pop()
    if sizes.value > sizes.key:
        raise ValueError(
            f"model: value heads of {sizes.value} are larger than key heads of {sizes.key}, to which they would be "
            "padded; leave plain_prefill out"
        )
    caps = [layer.logits_soft_cap for layer in layers if layer.logits_soft_cap]
    asked = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": sizes.key,
        "logits_soft_cap": caps[0] if caps else None,
        **fields,
        "features": {"encoder_decoder", "lse", *fields.get("features", ())},
    }
    return PlainPrefill(select(AttentionRequest(**asked), host=host), workspace_tokens, least_saved)


class _Sizes(NamedTuple):
    """The sizes of a latent layer, in numbers."""

    rank: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, module: Any) -> _Sizes:
        return cls(module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim)

    @property
    def key(self) -> int:
        """Of a key head."""
        return self.nope + self.rope

    def saved(self, host: Any) -> int:
        """Products a head that prefills of these host arrays save plainly; negative where they take more."""
        queries, contexts = (array.astype("int64") for array in (host.query_lens, host.context_lens))
        pairs = int((queries * contexts + queries * (queries + 1) // 2).sum())
        absorbed, plain = 2 * self.rank + self.rope, self.key + self.value
        # Projecting a step's own tokens takes as many products as absorbing them into query and output.
        return pairs * (absorbed - plain) - int(contexts.sum()) * self.rank * (self.nope + self.value)


class _PlainStep(NamedTuple):
    """A step whose prefills run plainly."""

    prefills: slice
    """Their tokens."""
    decodes: slice
    decode_metadata: Any
    """Of the decodes, planned; None without any."""
    own: Any
    """Of the prefills' own tokens."""
    chunks: list[tuple[Tensor, Any]]
    """Slots, int64 on the device, and metadata of each chunk of the prefills' contexts."""


class PlainLayers:
    """The latent layers of a model, whose prompts run plainly where that pays."""

    def __init__(self, plain: PlainPrefill, latent: AttentionBackend, layers: tuple[ModelLayer, ...]) -> None:
        self._latent, self._plain = latent, plain
        # Two, since a backend plans each step for all layers that it has: these attend in different steps.
        self._own, self._across = (plain.choice.create(latent.config.device) for _ in range(2))
        self._impls: dict[str, tuple[AttentionImpl, AttentionImpl]] = {}
        for layer in layers:
            asked: dict[str, Any] = {"scale": layer.scale, "logits_soft_cap": layer.logits_soft_cap}
            across = self._across.impl(layer.name, **asked, attn_type="encoder_decoder")
            self._impls[layer.name] = self._own.impl(layer.name, **asked), across
        self._num_heads, self._sizes = layers[0].num_heads, _Sizes.of(layers[0].module)
        made_for, needed = (self._own.config.num_heads, self._own.config.head_size), (self._num_heads, self._sizes.key)
        if made_for != needed:
            raise ValueError(
                f"plain_prefill: made for (heads, size) {made_for}, but these layers have {needed}; make it of the "
                "same model"
            )

    def step(self, metadata: Any) -> _PlainStep | None:
        """How a step runs; None: absorbed. Made for its first layer, and kept with the step."""
        kept: dict[Any, Any] = metadata.kept
        if self not in kept:
            kept[self] = self._made(metadata) if self.pays(metadata) else None
        step: _PlainStep | None = kept[self]
        return step

    def pays(self, metadata: Any) -> bool:
        """Whether a step saves as many products as it must; it is eager, and the host knows its tables and lengths."""
        if not isinstance(metadata, CommonAttentionMetadata) or metadata.use_cuda_graph or not metadata.num_prefills:
            return False
        host = metadata.host
        if getattr(host, "block_table", None) is None or metadata.host_lengths != "exact":
            return False  # of an engine's own tensors, or upper bounds
        if any(getattr(host, name, None) is not None for name in ("tree_mask", "span_ends")):
            return False
        prefills = metadata.prefill_metadata
        return prefills is not None and self._num_heads * self._sizes.saved(prefills.host) > self._plain.least_saved

    def _made(self, metadata: CommonAttentionMetadata) -> _PlainStep:
        prefills, decodes = metadata.prefill_metadata, metadata.decode_metadata
        assert prefills is not None
        first = metadata.num_decode_tokens if metadata.decodes_first else 0
        other = 0 if metadata.decodes_first else metadata.num_prefill_tokens
        if decodes is not None:
            self._latent.plan(decodes)
        own = new_tokens_metadata(prefills, self._own)
        self._own.plan(own)
        return _PlainStep(
            slice(first, first + metadata.num_prefill_tokens),
            slice(other, other + metadata.num_decode_tokens),
            decodes,
            own,
            self._chunks(prefills),
        )

    def _chunks(self, prefills: CommonAttentionMetadata) -> list[tuple[Tensor, Any]]:
        host, block_size = prefills.host, self._latent.config.block_size
        contexts = host.context_lens
        workspace = max(self._plain.workspace_tokens, block_size * int((contexts > 0).sum()))
        chunks, made = context_chunks(host.block_table, contexts, block_size, workspace), []
        for index, slots in enumerate(chunks.chunk_slots):
            metadata = context_chunk_metadata(prefills, chunks, index, self._across)
            made.append((self._across.from_host(slots), metadata))
        return made

    def attend(
        self, name: str, latent: LatentLayer, impl: AttentionImpl, kv_cache: Any, step: _PlainStep, metadata: Any,
        query: Tensor, rows: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """The output (T, heads, v_head_dim) of a layer: ``query`` is (T, heads, qk_nope_head_dim + qk_rope_head_dim),
        ``rows`` (T, 1, kv_lora_rank + qk_rope_head_dim), whose first columns are ``values``. Rows of padding are 0.
        """
        impl.write_cache(rows, values, kv_cache, metadata)
        output = query.new_zeros((*query.shape[:2], self._sizes.value))
        if step.decode_metadata is not None:
            some = step.decodes
            given = latent.absorbed_rows(query[some]), rows[some], values[some], kv_cache, step.decode_metadata
            output[some] = latent.expanded(impl.forward(*given, write=False))
        some = step.prefills
        output[some] = self._attend_plainly(name, latent, impl, kv_cache, step, query[some], rows[some])
        return output

    def _attend_plainly(
        self, name: str, latent: LatentLayer, impl: AttentionImpl, kv_cache: Any, step: _PlainStep, query: Tensor,
        rows: Tensor,
    ) -> Tensor:  # fmt: skip
        own, across = self._impls[name]
        if not step.chunks:
            output = own.forward(query, *self._made_of(latent, rows), None, step.own)
            return output[..., : self._sizes.value]
        output, lse = own.forward_with_lse(query, *self._made_of(latent, rows), None, step.own)
        keys, _ = impl.backend.kv_cache_views(kv_cache)
        for slots, metadata in step.chunks:  # merged one by one: outputs of many chunks would fill the memory
            cached = _unscaled(reference_cache.read(keys, slots), impl.k_scale, query.dtype)
            if self._across.has_plan:  # in each layer: it may keep one step's plan alone, and there are several
                self._across.plan(metadata)
            part, part_lse = across.forward_with_lse(query, *self._made_of(latent, cached), None, metadata)
            output, lse = merge_attention((output, part), (lse, part_lse))
        return output[..., : self._sizes.value]

    def _made_of(self, latent: LatentLayer, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latent rows, (tokens, heads, key size) both."""
        keys, values = latent.projected(rows)
        if (missing := self._sizes.key - self._sizes.value) > 0:
            values = pad(values, (0, missing))
        return keys, values


def _unscaled(rows: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache in the model's dtype, without the scale of an fp8 one."""
    rows = rows.to(dtype)
    return rows if isinstance(scale, float) and scale == 1.0 else (rows * scale).to(dtype)
