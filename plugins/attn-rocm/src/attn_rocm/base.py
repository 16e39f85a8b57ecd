"""What all variants have in common: the cache, the device, a layer's constants, and checks of what it is handed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from attn_rocm import settings
from attn_rocm.tiles import SUPPORTED, known
from attncore import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionType,
    BackendConfig,
    CacheWriter,
    LayerFeatures,
)
from attncore.ops import not_by_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RocmBackend(AttentionBackend):
    """Head sizes, caches and the device, for every variant.

    The cache is (2, blocks, block size, kv heads, head size), keys before values, or with heads before tokens in layout
    HND. Raises ValueError where the device is not one that the plugin knows, beside what the base class refuses.
    """

    list_layout = "rocm"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        asked = config.options.get("kernel", "auto")
        if config.variant and asked not in ("auto", settings.kernel_of(config.variant)):
            raise ValueError(
                f"options: kernel {asked!r} is asked for now, but {config.variant!r} was chosen before; give it in the "
                "request, options={'rocm': {'kernel': ...}}"
            )
        self.arch, self.units = architecture(config.device)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """``(2, num_blocks, block_size, num_kv_heads, head_size)``; HND: heads before the tokens of a block."""
        inner = (block_size, num_kv_heads) if self.config.kv_cache_layout == "NHD" else (num_kv_heads, block_size)
        return (2, num_blocks, *inner, head_size)


def architecture(device: str) -> tuple[str, int]:
    """The name of a torch device's architecture, ``gfx942`` or ``sm_90``, and its number of compute units.

    ``cpu`` stands for Triton's interpreter. ValueError for anything that is not in the table.
    """
    kind = torch.device(device).type
    if kind == "cpu" and settings.dev_device() == "cpu":
        return "cpu", 0
    if kind != "cuda":
        raise ValueError(f"device: {device} is no GPU; supported: {SUPPORTED}")
    facts = torch.cuda.get_device_properties(device)
    gfx = str(facts.gcnArchName).partition(":")[0] if torch.version.hip else ""  # gfx942:sramecc+:xnack-
    name = gfx or f"sm_{facts.major}{facts.minor}"
    if known(name) is None:
        raise ValueError(f"device: {device} is a {name}; supported: {SUPPORTED}")
    return name, int(facts.multi_processor_count)


_NO_CACHE_YET = object()
"""In the place of a layer's last cache."""


class RocmImpl(AttentionImpl):
    """One layer: its scoring as tensors on the device, its cache writer, checks of what it is handed."""

    backend: RocmBackend

    def __init__(self, backend: AttentionBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        self._caches_of: Any = _NO_CACHE_YET
        self._parts: tuple[Tensor, ...] = ()
        self._places: list[int] = []
        self._caches: tuple[Tensor, Tensor]
        self._write: Callable[[Tensor, Tensor, Tensor], None]
        self._formats: Any = None
        self.writer = CacheWriter(self.k_scale, self.v_scale)
        self.slopes, self.head_sinks = self._per_head(self.alibi_slopes), self._per_head(self.sinks)

    def scales_changed(self) -> None:
        self.writer, self._caches_of = CacheWriter(self.k_scale, self.v_scale), _NO_CACHE_YET  # ``caches`` takes it

    def _per_head(self, numbers: Sequence[float] | Tensor | None) -> Tensor | None:
        if numbers is None:
            return None
        return torch.as_tensor(numbers, dtype=torch.float32, device=self.backend.config.device).contiguous()

    def caches(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """Keys and values as views (blocks, block size, kv heads, head size): those of the last cache are kept."""
        if (
            kv_cache is not self._caches_of or isinstance(kv_cache, list)  # it may hold other tensors the next time
            or [part.data_ptr() for part in self._parts] != self._places  # they were given other memory (``set_``)
        ):  # fmt: skip
            caches = self.backend.kv_cache_views(kv_cache)
            write, parts = self.writer.into(*caches), (kv_cache,) if isinstance(kv_cache, Tensor) else tuple(kv_cache)
            self._caches_of = _NO_CACHE_YET  # until all is of this one: an interrupt may come in between
            self._caches, self._write = caches, write
            self._parts, self._places = parts, [part.data_ptr() for part in parts]
            self._caches_of = kv_cache
            return caches
        return self._caches

    def written(self, key: Any, value: Any, kv_cache: Any, slots: Tensor, *, write: bool) -> tuple[Tensor, Tensor]:
        """``caches``, to which the step's keys and values have been written, where they are to be."""
        caches = self.caches(kv_cache)
        if write:
            self._write(key, value, slots)
        return caches

    def checked(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata, output: Tensor | None
    ) -> Tensor:
        """The output to fill; ValueError naming the argument where tensors are not the backend's, TypeError where they
        stand in another order.
        """
        self.check_order(query, metadata)
        tensors = {"query": query, "key": key, "value": value, "output": output}
        try:
            formats = [_format(tensor) for tensor in tensors.values()]
        except (AttributeError, RuntimeError):  # no tensor, or one without strides
            formats = None
        if formats is None or formats != self._formats:
            self._check_formats(tensors)
            self._formats = formats
        self._check_tokens(query, key, value, metadata)
        if kv_cache is not None:
            self.caches(kv_cache)
        elif self.attn_type is AttentionType.DECODER and metadata.num_tokens and metadata.block_table.shape[1]:
            contexts = getattr(metadata.host, "context_lens", None)
            if contexts is None or contexts.any():
                raise ValueError("kv_cache: None found; a step of requests that have context needs the cache")
        if output is None:
            return torch.empty_like(query, memory_format=torch.contiguous_format)
        if len(output) < len(query):
            raise ValueError(f"output: length {len(output)} found for {len(query)} of query")
        return output

    def _check_formats(self, tensors: dict[str, Any]) -> None:
        """What kernels, which read by address and stride, and the configuration ask of tensors; None is none."""
        config, query = self.backend.config, tensors["query"]
        for name, given in tensors.items():
            if given is None and name != "query":
                continue
            if not isinstance(given, Tensor):
                raise TypeError(f"{name}: {type(given).__name__} found; give a torch tensor")
            if (why := not_by_address(given)) is not None:
                raise ValueError(f"{name}: {why}")
            heads = config.num_kv_heads if name in ("key", "value") else config.num_heads
            if given.dim() != 3 or given.shape[1:] != (heads, config.head_size) or given.stride(2) != 1:
                raise ValueError(
                    f"{name}: shape {tuple(given.shape)} with strides {given.stride()} found; expected (tokens, "
                    f"{heads}, {config.head_size}), contiguous in the last dimension"
                )
            if str(query.dtype) != f"torch.{config.dtype}":
                raise ValueError(f"query: {query.dtype} found; the backend was made for {config.dtype}")
            if given.dtype != query.dtype or given.device != query.device:
                raise ValueError(
                    f"{name}: {given.dtype} on {given.device} found; query is {query.dtype} on {query.device}"
                )

    def _check_tokens(self, query: Tensor, key: Any, value: Any, metadata: AttentionMetadata) -> None:
        """ValueError where kernels would read beyond a tensor: it has fewer tokens than the metadata. How many
        tokens of encoders a step has is not looked at: the spec needs no starts of them on the host.
        """
        if self.attn_type is AttentionType.ENCODER:
            return
        own = self.attn_type is not AttentionType.ENCODER_DECODER
        wanted = metadata.num_tokens
        for name, given in (("query", query), *((("key", key), ("value", value)) if own else ())):
            if given is not None and len(given) < wanted:
                raise ValueError(f"{name}: length {len(given)} found; the metadata has {wanted}")


def check_given(key: Any, value: Any) -> None:
    """ValueError where keys that are written, or that no slot of the cache holds, are not given."""
    for name, given in (("key", key), ("value", value)):
        if given is None:
            raise ValueError(
                f"{name}: None found; this step's own are written, or attended where the cache has none of them (rows "
                "without a block table, tokens that a window left out), so give them"
            )


def _format(tensor: Tensor | None) -> Any:
    """All that ``RocmImpl._check_formats`` depends on, at half of its price; RuntimeError without strides."""
    if tensor is None:
        return None
    place = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), place, tensor.dtype, tensor.device, tensor.is_neg()
