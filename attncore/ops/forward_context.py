"""The forward context: where the layers of a step find its metadata and their implementations, by their names.

The engine enters one around the model. ``attncore.ops.operator`` reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attncore.quoted import quoted, type_name

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.abstract import AttentionImpl, AttentionMetadata


class NoLayersCache(KeyError):  # noqa: N818  (what a caller sees is a KeyError)
    """An operator without a name was given a cache that is no layer's of its context."""


class ForwardContext:
    """What layers of a step find by their names. Entered with ``with``; contexts nest, a thread sees its own only.

    RuntimeError where one is left before one that was entered in it: layers would find another step than theirs.
    """

    __slots__ = ("_by_address", "_by_layer", "_of_all", "impls", "metadata")

    def __init__(
        self,
        metadata: AttentionMetadata | Mapping[str, AttentionMetadata],
        impls: Mapping[str, AttentionImpl],
        by_address: Mapping[int, str] | None = None,
    ) -> None:
        """``by_address``: names of layers by the address of their cache, for calls of the operator without a name."""
        if not isinstance(impls, Mapping):
            raise TypeError(
                f"impls: {type_name(impls)} found; give a mapping of a layer's name to its backend.impl(...)"
            )
        self.metadata, self.impls, self._by_address = metadata, impls, by_address or {}
        self._by_layer: Mapping[str, AttentionMetadata] | None = None
        self._of_all: AttentionMetadata | None = None
        if isinstance(metadata, Mapping):
            self._by_layer = metadata
        else:
            self._of_all = metadata

    def __enter__(self) -> ForwardContext:
        here.outer.append(here.context)
        here.context = self
        return self

    def __exit__(self, *_: object) -> None:
        if here.context is self:
            here.context = here.outer.pop()
            return
        for index in reversed(range(len(here.outer))):
            if here.outer[index] is self:
                del here.outer[index]  # the one that was entered since goes on
                break
        raise RuntimeError(
            "forward_context: left before one that was entered in it, such as by a generator or a task that waits "
            "inside; layers that ran meanwhile may have found another step, so leave it before waiting"
        )

    def layer(self, name: str) -> tuple[AttentionImpl, AttentionMetadata]:
        """The layer's implementation and metadata; KeyError that names the layer where there is none."""
        impl = self.impls.get(name)
        if impl is None:
            known = ", ".join(list(self.impls)[:4]) or "none"
            raise KeyError(f"layer_name: {quoted(name)} is not in this forward context; its layers: {known}")
        if self._of_all is not None:
            return impl, self._of_all
        if self._by_layer is None or name not in self._by_layer:
            raise KeyError(f"layer_name: {quoted(name)} has no metadata in this forward context")
        return impl, self._by_layer[name]

    def name_of(self, kv_cache: list[Tensor]) -> str:
        """The layer whose cache this is; a KeyError, NoLayersCache, where it is no layer's."""
        name = self._by_address.get(kv_cache[0].data_ptr()) if kv_cache else None
        if name is None:
            raise NoLayersCache(
                "layer_name: none given, and the cache is no layer's of this forward context; give a name, or run a "
                "compiled model over the caches that it was compiled with"
            )
        return name


class _Here(threading.local):
    context: ForwardContext | None = None

    def __init__(self) -> None:  # once in each thread
        self.outer: list[ForwardContext | None] = []  # of this thread, since several may enter one context


here = _Here()
"""``here.context`` is the innermost context of this thread; None outside of one."""


def forward_context(
    metadata: AttentionMetadata | Mapping[str, AttentionMetadata], impls: Mapping[str, AttentionImpl]
) -> ForwardContext:
    """A context in which ``attncore.attention`` finds a step: ``with forward_context(metadata, impls): model(...)``.

    ``impls`` maps layer names to what ``backend.impl`` made; ``metadata`` is the step's, or a mapping of layer names to
    metadata where layers belong to several KV-cache groups (``metadata.groups[...]``). Making one costs no copy.
    Generators and tasks of a thread share its contexts: leave one before waiting.
    """
    return ForwardContext(metadata, impls)
