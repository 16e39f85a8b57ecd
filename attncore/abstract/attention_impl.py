"""One layer's attention: AttentionImpl, which a vendor writes, and what it is made with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Required, TypedDict

from attncore.abstract import scales
from attncore.abstract.sinks import own_sinks, write_sinks
from attncore.arguments import flag  # by its module: a name that the package lacks loads difflib
from attncore.quoted import type_name
from attncore.show import angled, counted, guarded, short
from attncore.vocabulary import AttentionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncore.abstract.attention_metadata import AttentionMetadata
    from attncore.abstract.backend_config import BackendConfig


class PlanKey(NamedTuple):
    """What layers must share to share one plan."""

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    attn_type: AttentionType = AttentionType.DECODER
    """Layers of the types ``encoder`` and ``encoder_only`` read no cache: a library that plans paged attention alone
    plans nothing for them.
    """


class LayerFeatures(TypedDict, total=False):
    """What ``backend.impl`` hands to a layer's class: a subclass with an ``__init__`` of its own takes them as
    ``**features: Unpack[LayerFeatures]`` and passes them on.
    """

    scale: Required[float]
    sliding_window: int | None
    logits_soft_cap: float | None
    alibi_slopes: Sequence[float] | Tensor | None
    sinks: Sequence[float] | Tensor | None
    k_scale: float | Tensor
    v_scale: float | Tensor
    attn_type: AttentionType


class BackendOfLayer(Protocol):
    """What AttentionImpl reads of its backend, which is an AttentionBackend."""

    name: str
    config: BackendConfig

    def kv_cache_views(self, kv_cache: Any) -> tuple[Tensor, Tensor]: ...
    def own_scales(self, k_scale: Any, v_scale: Any) -> tuple[float | Tensor, float | Tensor]: ...
    def kv_cache_torch_dtype(self) -> Any: ...


class AttentionLayer(Protocol):
    """What the core expects of a layer object, where an engine hands one over: names and the two cache scales."""

    layer_name: str
    impl: AttentionImpl
    k_scale: float | Tensor
    v_scale: float | Tensor


class AttentionImpl(ABC):
    """One layer's attention. Made at start-up by ``backend.impl``; ``forward`` runs in every step, through no hook.

    ``alibi_slopes`` and ``sinks`` are one float per *local* query head, or None; ``backend.impl`` gives sinks as a
    float32 tensor (num_heads,) of the layer's own on the device, which ``set_sinks`` writes to. ``k_scale`` and
    ``v_scale`` multiply what an fp8 cache holds: floats, or float32 tensors on the device, (1,) or (num_kv_heads,).
    ``attn_type`` is handed over for layers that are not of type ``decoder`` only, so that a class that knows of no
    other need not take it.
    """

    __writer: Any = None

    def __init__(
        self,
        backend: BackendOfLayer,
        layer_name: str,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sinks: Sequence[float] | Tensor | None = None,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        attn_type: AttentionType = AttentionType.DECODER,
    ) -> None:
        self.backend = backend
        self.layer_name = layer_name
        self.scale = scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.sinks = sinks
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.attn_type = attn_type

    @guarded
    def __repr__(self) -> str:
        facts = [f"scale {short(self.scale)}"]
        for name in ("sliding_window", "logits_soft_cap"):
            if (value := getattr(self, name)) is not None:
                facts.append(f"{name} {short(value)}")
        facts += [name for name in ("alibi_slopes", "sinks") if getattr(self, name) is not None]
        # A scale may be a tensor: comparing it would wait for its device.
        texts = [(name, short(getattr(self, name))) for name in ("k_scale", "v_scale")]
        facts += [f"{name} {text}" for name, text in texts if text != "1.0"]
        facts += [f"attn_type {self.attn_type}", f"backend {short(self.backend.name)} on {self.backend.config.device}"]
        return angled(f"{type(self).__name__} of layer {short(self.layer_name)}", facts)

    def set_scales(self, k_scale: Any, v_scale: Any) -> None:
        """Sets the scales of the cache where they become known after the layer was made: with the weights, say.

        Of the kinds that ``backend.impl`` takes. A layer that was made with tensors keeps them, and they are written to
        in place, so that captured graphs see the new ones; a number that a graph was captured with stays in it. What
        the cache holds is not changed. Called by the engine between steps. ValueError as of ``impl``; a refused call
        changes nothing.
        """
        new = self.backend.own_scales(k_scale, v_scale)
        self.k_scale = scales.replaced(self.k_scale, new[0])
        self.v_scale = scales.replaced(self.v_scale, new[1])
        self.__writer = None
        self.scales_changed()

    def scales_changed(self) -> None:  # noqa: B027
        """Called by ``set_scales``: ``k_scale`` and ``v_scale`` may be other objects now, and have other values.

        Nothing by default: for a class that keeps something which it made of them. It must not refuse, and writes in
        place what a captured graph reads.
        """

    def set_sinks(self, sinks: Any) -> None:
        """Sets the sinks of a layer that has some: where they come after it, or change, with the weights.

        Of the kinds that ``backend.impl`` takes. They are written to ``self.sinks`` in place, on the current stream, so
        that captured graphs see them. Called by the engine between steps, or before the layer inside a capture, whose
        replays then read the tensor that was given. ValueError as of ``impl``, and for a layer without sinks, which is
        planned and compiled without; a refused call changes nothing.
        """
        if self.sinks is None:
            raise ValueError(f"sinks: layer {short(self.layer_name)} was made without; make it with sinks")
        new = own_sinks(sinks, self.backend.config)
        if scales.is_tensor(self.sinks):
            write_sinks([self.sinks], [new])  # type: ignore[list-item]
        else:  # of a layer that no backend.impl has made
            self.sinks = new
        self.sinks_changed()

    def sinks_changed(self) -> None:  # noqa: B027
        """Called by ``set_sinks``, and by who writes to ``sinks`` in place: their values are others now.

        Nothing by default: a class that reads ``self.sinks`` where it runs, or hands that tensor to its kernel, needs
        nothing. For one that keeps something which it made of them: it writes in place what a captured graph reads,
        without waiting for the device.
        """

    def calculate_kv_scales(self, key: Tensor, value: Tensor | None) -> None:
        """Sets the scales from the keys and values of a first batch, on the device; nothing synchronises.

        The largest number takes ``1 / 2`` of the cache's range, of a layer with scales per head the largest of each
        head; what is infinite or NaN is not counted. ``key`` and ``value`` are those of ``forward``, without padding;
        of a latent cache, whose values are a part of its keys, ``value`` is None. A layer that was made with numbers
        has tensors of one element afterwards. ValueError as of ``set_scales``, and where keys or values are no strided
        floats of two bytes or more; TypeError where they are no tensors.
        """
        config = self.backend.config
        if not config.kv_cache_dtype.startswith("fp8"):
            raise ValueError(f"kv_cache_dtype: {config.kv_cache_dtype} found; scales are calculated for an fp8 cache")
        import torch

        largest = torch.finfo(self.backend.kv_cache_torch_dtype()).max
        values = ("key", key) if config.use_mla else ("value", value)
        self.set_scales(
            scales.calculated("key", key, self.k_scale, config.num_kv_heads, largest),
            scales.calculated(*values, self.v_scale, config.num_kv_heads, largest),
        )

    @abstractmethod
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
        """Write this step's keys and values to the cache by ``metadata.slot_mapping``, then attend over it.

        Called by the engine for every layer of every step, perhaps inside a CUDA-graph capture; it must not synchronise
        the device with the host. ``query`` is (T, num_heads, head_size), ``key`` (T, num_kv_heads, head_size),
        ``value`` (T, num_kv_heads, head_size_v), T = ``metadata.num_tokens`` or more, all on the backend's device in
        its dtype. Of these and of ``output`` only the last dimension is contiguous; the others may have any stride
        (slices of one fused QKV tensor). ``kv_cache`` is what ``allocate_kv_cache`` gave. A slot below 0 writes
        nothing. Returns (T, num_heads, head_size_v), which is ``output`` where that is given.

        With ``use_mla`` key is the latent rows (T, 1, head_size), their first head_size_v columns are the values, and
        ``value`` is None. The other types of attention take tensors of E encoder tokens, and key and value may be None
        where E is 0: docs/contract.md says which.

        Without ``write`` nothing is written: the step's keys and values are in the cache already, put there by another
        layer, by ``write_cache`` or by the engine. They are read there, and ``key`` and ``value``, which may be None,
        only of rows that have no block table (prompts of the list builder), and where ``kv_cache`` is None.
        """

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
        """``forward``, and float32 (T, num_heads): the natural logarithm of each softmax's sum, a sink included.

        Where a query sees no key it is infinite and the output 0; in a layer with sinks it is the sink there. What
        ``attncore.merge`` merges. Written by vendors whose spec declares ``lse``; a ValueError that says why not
        otherwise.
        """
        spec = self.backend.config.spec
        why = "its class has no forward_with_lse"
        if spec is not None and "lse" not in spec.features:
            why = spec.unsupported.get("lse", "its spec does not declare lse")
        raise ValueError(f"forward_with_lse: {self.backend.name} returns no log-sum-exp: {why}")

    def check_order(self, query: Any, metadata: Any) -> None:
        """TypeError where another argument of ``forward`` stands in the place of ``query`` or ``metadata``.

        For a vendor's ``forward`` to call off its usual path, such as where an attribute is missing or a cache is new.
        """
        for name, given, attribute, wanted in (
            ("query", query, "shape", "the step's queries, a tensor"),
            ("metadata", metadata, "host", "the step's metadata"),
        ):
            if not hasattr(given, attribute):
                raise TypeError(
                    f"{name}: {type_name(given)} found; give {wanted}: forward(query, key, value, kv_cache, metadata)"
                ) from None

    def check_step(
        self,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> None:
        """ValueError or TypeError that names the first argument of ``forward`` which does not fit the configuration.

        For a vendor's ``forward`` to call first, with its own arguments, so that a refused step writes nothing: shapes,
        dtypes, devices, fields of the metadata, slots past the end of the cache, a cache that is missing. The block
        table's content is not read. It takes up to a tenth of a millisecond and does not wait for the device; a backend
        to which that is much calls it off its usual path.
        """
        from attncore.ops.step_checks import check_step

        check_step(self, (query, key, value), kv_cache, metadata, output, write=flag("write", write))

    @staticmethod
    def check_write(write: object) -> bool:
        """``forward``'s ``write`` as a bool; TypeError where it is none. For a vendor's ``forward``."""
        return flag("write", write)

    def write_cache(self, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata) -> None:
        """Write this step's keys and values to the cache, as ``forward`` does before it attends, and nothing else.

        By ``slot_mapping``, of a cross layer ``cross_slot_mapping``; layers that keep no cache, and profiling runs,
        whose ``kv_cache`` is None, write nothing. Here by ``attncore.CacheWriter`` over ``backend.kv_cache_views``. It
        does not wait for the device, and may be captured. ValueError naming the argument where tensors do not fit, and
        TypeError for what is none.

        ``key`` and ``value`` are those of ``forward``: ``value`` is None with ``use_mla``. A None otherwise is a
        ValueError where there are slots, and nothing to write where there are none (a cross layer without new encoder
        tokens), as where the layer keeps no cache: it never means that the keys are in the cache already.
        """
        if self.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_DECODER) or kv_cache is None:
            return
        crosses = self.attn_type is AttentionType.ENCODER_DECODER
        try:
            slots = metadata.cross_slot_mapping if crosses else metadata.slot_mapping
        except AttributeError:
            if hasattr(metadata, "host"):  # metadata says itself which field it lacks
                raise
            raise TypeError(f"metadata: {type(metadata).__name__} found; give the step's metadata") from None
        if not len(slots):
            return
        latent = self.backend.config.use_mla
        if key is None or (value is None and not latent):
            name = "value" if key is not None else "key"
            raise ValueError(
                f"{name}: None found for {counted(len(slots), 'token')} to write; give their keys and values"
            )
        if latent:
            if not scales.is_tensor(key):
                raise TypeError(f"key: {type(key).__name__} found; give a torch tensor on the cache's device")
            scales.check_strided("key", key)
            if not key.dim():
                raise ValueError("key: shape () found; give latent rows (tokens, 1, head size)")
        if self.__writer is None:
            from attncore.ops.cache_writer import CacheWriter

            self.__writer = CacheWriter(self.k_scale, self.k_scale if latent else self.v_scale)
        keys, values = self.backend.kv_cache_views(kv_cache)  # not kept: a list may hold other tensors the next time
        self.__writer(key, key[..., : values.shape[3]] if latent else value, keys, values, slots)
