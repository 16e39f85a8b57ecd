"""vLLM's ``AttentionBackend`` for an attncore backend: what it says of itself, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from attncore.integrations.vllm import model_request as asked
from attncore.integrations.vllm import refusals
from attncore.integrations.vllm.layer import AttncoreImpl
from attncore.integrations.vllm.metadata_builder import AttncoreMetadataBuilder
from attncore.quoted import one_line
from attncore.registry.plugins.load import registry
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec

_LAYOUTS = {"NHD": KVCacheLayout.LBNHC, "HND": KVCacheLayout.LBHNC}
"""attncore's layout of a cache -> the order of memory in which vLLM makes it."""
_MOST_BLOCK = 4096
"""A block of more tokens than this is not offered to vLLM."""


class AttncoreBackend(AttentionBackend):
    """An attncore backend in vLLM. The classes that vLLM is given are made by ``class_for``.

    vLLM's questions of single facts (``supports_sink`` and so on) are answered with yes: what can be used, and why not,
    is attncore's to say of all facts together, in ``validate_configuration``.
    """

    attncore_name: ClassVar[str | None] = None
    """The attncore backend; None: attncore's own choice."""
    member: ClassVar[str] = ""
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(refusals.KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = True
    _chosen: ClassVar[BackendSpec | None] = None
    """The spec that the last validated configuration led to in this process."""

    @classmethod
    def get_name(cls) -> str:
        """The name of the member in vLLM."""
        return cls.member

    @staticmethod
    def get_impl_cls() -> type[AttncoreImpl]:
        """The class of layers."""
        return AttncoreImpl

    @classmethod
    def get_builder_cls(cls) -> type[AttncoreMetadataBuilder]:
        """The class of builders, which knows the backend."""
        made = vars(cls).get("_builder_cls")
        if made is None:
            made = type(f"{cls.__name__}Builder", (AttncoreMetadataBuilder,), {"attncore_name": cls.attncore_name})
            cls._builder_cls = made
        found: type[AttncoreMetadataBuilder] = made
        return found

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """None in particular: attncore's reasons name the sizes."""
        return []

    @classmethod
    def supports_sink(cls) -> bool:
        """See the class."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """See the class."""
        return True

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """The block sizes of the spec, the preferred one first: vLLM cuts its blocks into the kernel's."""
        spec = cls._spec()
        if spec is None:
            return [MultipleOf(16)]
        if isinstance(spec.block_sizes, sizes.MultipleOf):
            return [MultipleOf(spec.block_sizes.base)]
        preferred = spec.preferred_block_size
        return sorted((one for one in spec.block_sizes if one <= _MOST_BLOCK), key=lambda one: (one != preferred, one))

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """vLLM's own, or where the spec does not take that, the spec's."""
        spec = cls._spec()
        if spec is None or cls.supports_block_size(default_block_size):
            return default_block_size
        return int(spec.preferred_block_size or super().get_preferred_block_size(default_block_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those of the spec; one of layout ``own`` takes a strided pair in either."""
        spec = cls._spec()
        layouts = [_LAYOUTS[one] for one in spec.kv_cache_layouts if one in _LAYOUTS] if spec is not None else []
        return tuple(dict.fromkeys([*layouts, *_LAYOUTS.values()]))

    @classmethod
    def validate_configuration(cls, head_size: int, dtype: Any, kv_cache_dtype: Any, **facts: Any) -> list[str]:
        """Every reason against a kind of layers, each a sentence; an empty list where it runs."""
        facts.pop("device_capability", None)  # attncore asks the driver itself
        try:
            return cls._reasons(head_size, dtype, kv_cache_dtype, facts)
        except Exception as error:  # a bad option, a broken setting: vLLM shows it beside the name of the backend
            return [f"attncore: {one_line(error)}"]

    @classmethod
    def _reasons(cls, head_size: int, dtype: Any, kv_cache_dtype: Any, facts: Mapping[str, Any]) -> list[str]:
        attn_type, block_size = facts.get("attn_type", "decoder"), facts.get("block_size")
        others = {name: value for name, value in facts.items() if name not in ("attn_type", "block_size")}
        config = asked.current_config()
        found = [*refusals.refused_flags(others)]
        found += [
            why for why in (refusals.refused_attn_type(attn_type), refusals.refused_cache_dtype(kv_cache_dtype)) if why
        ]
        if config is not None:
            found += [why for why in refusals.refused_engine(config) if why not in found]
        reasons = [f"attncore: {why}" for why in found]
        if refusals.refused_cache_dtype(kv_cache_dtype) is None:
            request = asked.request_for_model(
                cls.attncore_name, config, head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype,
                block_size=block_size, has_sink=bool(facts.get("has_sink")),
                has_sliding_window=bool(facts.get("has_sliding_window")),
            )  # fmt: skip
            negotiation = asked.negotiated(request)
            reasons += asked.sentences(negotiation)
            if negotiation.chosen is not None:
                cls._chosen = negotiation.chosen.spec
        return reasons

    @classmethod
    def _spec(cls) -> BackendSpec | None:
        """The spec as the chosen variant states it; before a choice, as the plugin does. None for a broken plugin."""
        if cls._chosen is not None or cls.attncore_name is None:
            return cls._chosen
        return next((one.spec for one in registry().records if one.name == cls.attncore_name), None)


def class_for(name: str, backend: str | None, module: str) -> type[AttncoreBackend]:
    """The class of the name in vLLM, for an attncore backend (None: attncore's choice), to be found in ``module``."""
    return type(
        name, (AttncoreBackend,), {"__module__": module, "__qualname__": name, "attncore_name": backend, "member": name}
    )
