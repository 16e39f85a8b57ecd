"""A layer's attention as one torch operator, ``attncore::attention``, for models that are compiled or traced.

The operator's arguments are tensors and the layer's name; what else a step needs, its metadata and the layer's
implementation, is found through the forward context that the engine enters around the model. So one operator serves
every backend, and a compiled model holds nothing of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attncore.abstract import AttentionImpl, AttentionMetadata


class ForwardContext:
    """What layers of a step find by their names. Entered with ``with``; contexts nest, a thread sees its own only."""

    __slots__ = ("_by_layer", "_of_all", "_outer", "impls", "metadata")

    def __init__(
        self, metadata: AttentionMetadata | Mapping[str, AttentionMetadata], impls: Mapping[str, AttentionImpl]
    ) -> None:
        self.metadata, self.impls = metadata, impls
        self._by_layer: Mapping[str, AttentionMetadata] | None = None
        self._of_all: AttentionMetadata | None = None
        if isinstance(metadata, Mapping):
            self._by_layer = metadata
        else:
            self._of_all = metadata
        self._outer: list[ForwardContext | None] = []

    def __enter__(self) -> ForwardContext:
        self._outer.append(_here.context)
        _here.context = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.context = self._outer.pop()

    def layer(self, name: str) -> tuple[AttentionImpl, AttentionMetadata]:
        """The layer's implementation and metadata; KeyError that names the layer where there is none."""
        impl = self.impls.get(name)
        if impl is None:
            known = ", ".join(list(self.impls)[:4]) or "none"
            raise KeyError(f"layer_name: {name!r} is not in this forward context; its layers: {known}")
        if self._of_all is not None:
            return impl, self._of_all
        if self._by_layer is None or name not in self._by_layer:
            raise KeyError(f"layer_name: {name!r} has no metadata in this forward context")
        return impl, self._by_layer[name]


class _Here(threading.local):
    context: ForwardContext | None = None


_here = _Here()


def forward_context(
    metadata: AttentionMetadata | Mapping[str, AttentionMetadata], impls: Mapping[str, AttentionImpl]
) -> ForwardContext:
    """A context in which ``attncore.attention`` finds a step: ``with forward_context(metadata, impls): model(...)``.

    ``impls`` maps layer names to what ``backend.impl`` made; ``metadata`` is the step's, or a mapping of layer names to
    metadata where layers belong to several KV-cache groups (``metadata.groups[...]``). Making one costs no copy.
    """
    return ForwardContext(metadata, impls)


def attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Any,
    *,
    layer_name: str,
    head_size_v: int | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """``impl.forward`` of the layer ``layer_name`` in the current forward context, as a torch operator.

    The tensors are those of ``AttentionImpl.forward``; ``kv_cache`` is a tensor, a pair of them, or None in a profiling
    run. Returns ``output``, or a new (T, num_heads, head_size_v) like ``query``. Runs under ``torch.compile`` without a
    graph break. RuntimeError outside a forward context, KeyError for a layer that is not in it.
    """
    if output is None:
        output = torch.empty_like(query) if head_size_v is None else query.new_empty((*query.shape[:2], head_size_v))
    caches = [] if kv_cache is None else [kv_cache] if isinstance(kv_cache, Tensor) else list(kv_cache)
    torch.ops.attncore.attention(query, key, value, caches, output, layer_name)
    return output


def _attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: list[Tensor], output: Tensor, layer_name: str
) -> None:
    context = _here.context
    if context is None:
        raise RuntimeError(
            f"attention: layer {layer_name!r} ran outside a forward context; run the model inside "
            "`with attncore.forward_context(metadata, impls):`"
        )
    impl, metadata = context.layer(layer_name)
    caches = _pair(impl, kv_cache) if len(kv_cache) > 1 else kv_cache[0] if kv_cache else None
    impl.forward(query, key, value, caches, metadata, output)


def _pair(impl: Any, halves: list[Tensor]) -> tuple[Tensor, ...]:
    """The halves of a cache as a tuple that is the same one in every call: an operator's list is new each time, and
    layers know by identity the cache that they have seen.
    """
    kept: tuple[Tensor, ...] | None = vars(impl).get("_operator_pair")
    if kept is None or len(kept) != len(halves) or any(a is not b for a, b in zip(kept, halves, strict=True)):
        kept = impl._operator_pair = tuple(halves)
    return kept


def _nothing_to_compute(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: list[Tensor], output: Tensor, layer_name: str
) -> None:
    """The operator under fake tensors: it only writes what it is given."""


# A library kept for the life of the process: registered this way a call costs a tenth of what the decorator's does.
_library = torch.library.Library("attncore", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = "(Tensor query, Tensor? key, Tensor? value, Tensor(a!)[] kv_cache, Tensor(b!) output, str layer_name) -> ()"
_library.define(f"attention{_SCHEMA}")  # type: ignore[no-untyped-call]
_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("attncore::attention", _nothing_to_compute, lib=_library)
