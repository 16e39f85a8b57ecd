"""Compiling the layers of a model, each as one graph in which its attention is the operator ``attncore::attention``.

What attention needs is found before anything is traced: while a layer runs, its attention's module has the tensors of
its cache as an attribute. Layers of one kind share a graph, since it holds no name: the operator knows the layer by the
cache that it is given.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from attncore.arguments import flag
from attncore.integrations.transformers.attention_interface import CACHE, using_attncore
from attncore.integrations.transformers.forward_pass import (
    NoAttention,
    PagedCaches,
    address_of_cache,
    check_caches,
    guards_for_hooks,
    running_caches,
    running_over,
)
from attncore.integrations.transformers.fused_projections import Product, fuse_projections, products_in
from attncore.ops.forward_context import NoLayersCache

_EXPLAINS = ("Explanation:", "Developer debug context:")
_MOST_GRAPHS = 16
"""Of a layer: one for a step of one token and one for more, as often as what they are compiled for changes."""


def compile_layers(model: Any, kv_caches: PagedCaches, *, fuse: bool = True, **options: Any) -> None:
    """Compiles each layer of ``model`` that attends over ``kv_caches``, at once: runs it over a few tokens, without
    attention. Steps run as before, inside ``torch.inference_mode()`` and ``attncore_context(metadata, kv_caches)``.

    With ``fuse`` linear layers of one module that read the same tensor, such as query, key and value, get one weight,
    of which their own are parts, and are multiplied at once in compiled code: faster in steps of a few tokens. Values
    that are written to a parameter later are seen. Layers of which one is given another tensor, as by
    ``load_state_dict(..., assign=True)`` or ``model.to``, are compiled anew, apart.

    ``options`` are torch.compile's; unless given, ``fullgraph=True`` and ``dynamic=True``. Layers of one kind share two
    graphs, one for a step of one token and one for all others, whatever the lengths. ValueError that names the layer
    and the reason where one cannot be compiled; the model then runs as it did.

    Outside such a context, or over other caches, the layers run as if they were not compiled. The compiled layers of a
    model run in one thread at a time, over whatever caches.
    """
    check_caches(kv_caches)
    kv_caches._refuse_states("compile_layers")
    kv_caches._refuse_made_sinks("compile_layers")
    _refuse_shared(kv_caches)
    counts = _numbers_of_tokens(kv_caches)
    before, kv_caches._compiled = kv_caches._compiled, {}  # a second call runs the model as it is, not what it compiled
    try:
        if flag("fuse", fuse):
            fuse_projections(model, lambda: _run_without_attention(model, kv_caches, counts[:1]))
    except BaseException:
        kv_caches._compiled = before
        raise
    options = {"fullgraph": True, "dynamic": True, **options}
    attention: dict[str, list[tuple[Any, Any]]] = {}
    for module, name in kv_caches._names.items():
        whole = _tensors(kv_caches[name])
        attention.setdefault(_layer_of(model, name), []).append((module, (whole, "" if whole else name)))
    compiled = {}
    for name, modules in attention.items():
        layer = model.get_submodule(name)
        if not isinstance(vars(layer).get("forward"), _Forward):
            layer.forward = _Forward(layer.forward)
        compiled[layer.forward] = _Compiled(name, layer, modules, products_in(layer) if fuse else [], options)
    kv_caches._compiled = compiled
    try:
        with torch.inference_mode():
            _run_without_attention(model, kv_caches, counts)
    except BaseException:
        kv_caches._compiled = before
        raise


def _refuse_shared(kv_caches: PagedCaches) -> None:
    """ValueError where two layers have one cache: compiled ones are told apart by it alone."""
    for name, cache in kv_caches.items():
        if cache is not None and (last := kv_caches._by_address[address_of_cache(cache)]) != name:
            raise ValueError(
                f"kv_caches: layers {name} and {last} have one cache, by which compiled layers are told apart; give "
                "each its own (paged_caches(..., shared=False)), or run the model without compiling"
            )


def _tensors(cache: Any) -> list[Tensor]:
    """The tensors of a layer's cache: one or a pair, or none."""
    return [] if cache is None else [cache] if isinstance(cache, Tensor) else list(cache)


def _layer_of(model: Any, name: str) -> str:
    """The name of the layer that an attention layer is in: of the innermost list of modules, the one around it."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if isinstance(model.get_submodule(".".join(parts[: end - 1])), torch.nn.ModuleList):
            return ".".join(parts[:end])
    raise ValueError(
        f"layer {name}: it is in no list of layers (torch.nn.ModuleList) that could be compiled one by one"
    )


class _Forward:
    """In place of a layer's ``forward``: the compiled one where the caches of the running step have it."""

    def __init__(self, forward: Any) -> None:
        functools.update_wrapper(self, forward)
        self.plain = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = running_caches()
        return (self.plain if caches is None else caches._compiled.get(self, self.plain))(*args, **kwargs)


class _Compiled:
    """A layer's compiled ``forward`` over the caches that its attention, one module or several, has meanwhile."""

    number = 0
    """Of all that were made in this process, since torch counts the graphs of a class of layers, of whichever model."""

    def __init__(
        self, name: str, layer: Any, modules: list[tuple[Any, Any]], products: list[Product], options: Mapping[str, Any]
    ) -> None:
        _Compiled.number += 1
        self._products = products
        self._what = f"layer {name}: {type(layer).__name__} cannot be compiled"
        self._modules = [(vars(module), cache) for module, cache in modules]
        self._forward: Callable[..., Any] = torch.compile(layer.forward.plain, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for attributes, cache in self._modules:
            attributes[CACHE] = cache
        for product in self._products:
            product.open()
        try:
            try:
                return self._forward(*args, **kwargs)
            except FailOnRecompileLimitHit:  # nothing has run yet
                with _graphs_of_all_layers():
                    return self._forward(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise ValueError(f"{self._what}: {_reason(error)}") from error
        except NoLayersCache as error:
            raise ValueError(
                f"{self._what}: its attention is given a copy of the cache, by which layers are told apart; take a "
                "backend of torch.compile that writes it in place, such as inductor"
            ) from error
        finally:
            for attributes, _ in self._modules:
                attributes.pop(CACHE, None)
            for product in self._products:
                product.close()


@contextmanager
def _graphs_of_all_layers() -> Iterator[None]:
    """Inside, torch makes as many graphs of one function as all layers need that were compiled in this process.

    It counts them by the code of ``forward``, that is by the class of the layers, and by default makes 8: too few for
    some models of one class, or for layers of which each has a hook of its own.
    """
    config, names = torch._dynamo.config, ("recompile_limit", "accumulated_recompile_limit")
    before = {name: getattr(config, name) for name in names}
    try:
        for name, limit in before.items():
            setattr(config, name, max(limit, _MOST_GRAPHS * _Compiled.number))
        yield
    finally:
        for name, limit in before.items():
            setattr(config, name, limit)


def _reason(error: Exception) -> str:
    """What torch.compile says of a layer, on one line: its first line, then the lines that explain it."""
    if isinstance(error, FailOnRecompileLimitHit):
        error = cast("Exception", error.__cause__ or error)  # which limit, and what it is
    error = getattr(error, "inner_exception", error)  # of torch's backend, such as inductor
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(_EXPLAINS)]
    return "; ".join([*lines[:1], *filter(None, named)]) or type(error).__name__


def _run_without_attention(model: Any, kv_caches: PagedCaches, counts: tuple[int, ...]) -> None:
    """Runs every layer once for each number of tokens, within torch's limit on graphs of one function."""
    nothing: Any = NoAttention()
    with (
        using_attncore(model),
        guards_for_hooks(len(counts) * len(kv_caches)),
        running_over(object(), dict.fromkeys(kv_caches, nothing), kv_caches),
    ):
        for count in counts:
            model(**_given(model, kv_caches, count))


def _given(model: Any, kv_caches: PagedCaches, count: int) -> dict[str, Any]:
    """So many tokens as steps give them to the model. What it hands on to its layers is a part of what these are
    compiled for, so that another keyword in the first step would have each compiled anew.
    """
    known = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": torch.zeros((1, count), dtype=torch.int64, device=model.device)}
    if "position_ids" in known:
        given["position_ids"] = torch.arange(count, device=model.device).unsqueeze(0)
    if "use_cache" in known or kv_caches.num_uncached < len(kv_caches):  # an encoder has no cache to use
        given["use_cache"] = False
    return given


def _numbers_of_tokens(kv_caches: PagedCaches) -> tuple[int, int]:
    """Tokens of the runs that compile: 1 has a graph of its own, and the first stands for all other numbers.

    torch.compile takes sizes that are equal when it traces for one and the same, so it is no size of a cache.
    """
    sizes = {size for cache in kv_caches.values() for tensor in _tensors(cache) for size in tensor.shape}
    return next(count for count in itertools.count(7) if count not in sizes), 1
