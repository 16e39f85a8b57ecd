"""A layer's attention as one torch operator, ``attncore::attention``, for models that are compiled or traced.

The operator's arguments are tensors and the layer's name; what else a step needs, its metadata and the layer's
implementation, is found through the forward context that the engine enters around the model. So one operator serves
every backend, and a compiled model holds nothing of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attncore.arguments import flag, integer
from attncore.ops.forward_context import here
from attncore.quoted import quoted


def attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Any,
    *,
    layer_name: str,
    head_size_v: int | None = None,
    output: Tensor | None = None,
    write: bool = True,
) -> Tensor:
    """``impl.forward`` of the layer ``layer_name`` in the current forward context, as a torch operator.

    The tensors are those of ``AttentionImpl.forward``; ``kv_cache`` is a tensor, a pair of them, or None in a profiling
    run. Without ``write`` it attends and writes nothing to the cache. Returns ``output``, or a new (T, num_heads,
    head_size_v) like ``query``. Runs under ``torch.compile`` without a graph break. RuntimeError outside a forward
    context, KeyError for a layer that is not in it, ValueError for an empty name and a ``head_size_v`` below 1.

    Under ``torch.compile(dynamic=True)`` a cache has to begin where its storage does: give the whole cache as one
    tensor, or halves of separate storage. With a view at an offset, such as ``kv_cache[1]``, inductor calls the
    operator with other memory and overwrites the cache, so that compiling raises an error that says so.
    """
    if not layer_name:  # the operator of compiled layers takes it for "by the cache"
        raise ValueError(f"layer_name: {layer_name!r} found; give the layer's name in the forward context")
    if head_size_v is not None and not (isinstance(head_size_v, int) and head_size_v > 0):
        head_size_v = integer("head_size_v", head_size_v, 1)  # compiled code has no call then
    if output is None:
        output = torch.empty_like(query) if head_size_v is None else query.new_empty((*query.shape[:2], head_size_v))
    caches = [] if kv_cache is None else [kv_cache] if isinstance(kv_cache, Tensor) else list(kv_cache)
    write = write if write is True else flag("write", write)  # compiled code has no call then
    torch.ops.attncore.attention(query, key, value, caches, output, layer_name, write)
    return output


def _attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: list[Tensor], output: Tensor, layer_name: str,
    write: bool = True,
) -> None:  # fmt: skip
    context = here.context
    if context is None:
        raise RuntimeError(
            f"attention: layer {quoted(layer_name)} ran outside a forward context; run the model inside "
            "`with attncore.forward_context(metadata, impls):`"
        )
    impl, metadata = context.layer(layer_name or context.name_of(kv_cache))
    caches = _pair(impl, kv_cache) if len(kv_cache) > 1 else kv_cache[0] if kv_cache else None
    if write:
        impl.forward(query, key, value, caches, metadata, output)
    else:
        impl.forward(query, key, value, caches, metadata, output, write=False)


def _pair(impl: Any, halves: list[Tensor]) -> tuple[Tensor, ...]:
    """The halves of a cache as a tuple that is the same one in every call: an operator's list is new each time, and
    layers know by identity the cache that they have seen.
    """
    kept: tuple[Tensor, ...] | None = vars(impl).get("_operator_pair")
    if kept is None or len(kept) != len(halves) or any(a is not b for a, b in zip(kept, halves, strict=True)):
        kept = impl._operator_pair = tuple(halves)
    return kept


def _nothing_to_compute(
    query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: list[Tensor], output: Tensor, layer_name: str,
    write: bool = True,
) -> None:  # fmt: skip
    """The operator under fake tensors, and where one is on the meta device: it only writes what it is given.

    ValueError where the tensors are on different kinds of device: with one of them on the meta device torch calls this
    instead of the operator, which would leave ``output`` as it is. ValueError for a cache that is a view at an offset
    which compiled code does not know: inductor may then give the operator another part of the whole tensor, and write
    that part back over this one, even of a call that writes none.
    """
    named = [("key", key), ("value", value), *(("kv_cache", cache) for cache in kv_cache), ("output", output)]
    for name, tensor in named:
        if tensor is not None and tensor.device.type != query.device.type:
            raise ValueError(f"{name}: on {tensor.device}, but the query is on {query.device}")
    for cache in kv_cache:
        if not isinstance(cache.storage_offset(), int):
            raise ValueError(
                f"kv_cache: a view of shape {tuple(cache.shape)} at a symbolic offset found, of which "
                "torch.compile(dynamic=True) makes wrong code; give the whole cache as one tensor, or tensors of "
                "separate storage, or compile without dynamic=True"
            )


# A library kept for the life of the process: registered this way a call costs a tenth of what the decorator's does.
_library = torch.library.Library("attncore", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!)[] kv_cache, Tensor(b!) output, str layer_name, "
    "bool write=True) -> ()"
)
_library.define(f"attention{_SCHEMA}")  # type: ignore[no-untyped-call]
_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("attncore::attention", _nothing_to_compute, lib=_library)
