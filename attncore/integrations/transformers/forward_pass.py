"""A model's paged caches, and the context in which its layers attend over them by a step's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attncore.abstract import AttentionBackend, AttentionImpl, AttentionType
from attncore.arguments import flag, optional_integer
from attncore.builder.checked_backend import check_backend
from attncore.integrations.model_sinks import ModelSinks
from attncore.integrations.transformers.absorbed_projections import AbsorbedProjections, check_absorbed
from attncore.integrations.transformers.attention_interface import NAME, Attender, attending_by, current_attender
from attncore.integrations.transformers.model_layers import ModelLayer, attention_layers
from attncore.integrations.transformers.plain_prefill import PlainLayers, PlainPrefill
from attncore.integrations.transformers.recurrent_layers import StateCaches, recurrent_layers
from attncore.ops.forward_context import ForwardContext
from attncore.quoted import type_name
from attncore.show import counted


class PagedCaches(Mapping[str, Any]):
    """A model's paged caches by layer name, one a layer, and the layers' implementations. Made by ``paged_caches``."""

    def __init__(
        self,
        impls: Mapping[str, AttentionImpl],
        caches: Mapping[str, Any],
        names: Mapping[Any, str],
        states: StateCaches | None = None,
        plain: PlainLayers | None = None,
    ) -> None:
        self.impls, self._caches, self._names, self._plain = impls, caches, names, plain
        self._absorbed = AbsorbedProjections()
        self._sinks, self._passes_sinks = ModelSinks(), set[str]()
        self.states = states
        """The states of recurrent layers; None: the model has none."""
        self._compiled: dict[Any, Any] = {}  # by the layer's ``forward``: what ``compile_layers`` made of it
        self._by_address = {address_of_cache(cache): name for name, cache in caches.items() if cache is not None}
        self.num_uncached = sum(cache is None for cache in caches.values())
        configs = [module.config for module in names if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())

    def __getitem__(self, name: str) -> Any:
        return self._caches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._caches)

    def __len__(self) -> int:
        return len(self._caches)

    def runs_plainly(self, metadata: Any) -> bool:
        """Whether an eager forward pass runs the prompts of this step by keys and values of every head: where the
        caches were made with ``plain_prefill``, and it pays. ``metadata`` is a step's of latent layers.
        """
        return self._plain is not None and self._plain.pays(metadata)

    def _follow_sinks(self, layer: ModelLayer, impl: AttentionImpl) -> None:
        """The layer's sinks are a parameter that it passes to its attention, or what it makes in each forward pass."""
        for module in layer.module.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is layer.sinks and tensor is not None and tensor.device.type != "meta":
                        self._sinks.follow(layer.name, impl, held, key)
                        return
        self._passes_sinks.add(layer.name)

    def _follow_weights(self) -> None:
        """Brings up to date what attention keeps of the model's weights, before each forward pass; ValueError where it
        cannot.
        """
        if self._absorbed:
            self._absorbed.look_again()
        if self._sinks:
            self._sinks.update()

    def _check_called(self) -> None:
        """RuntimeError where the model's layers attend by another implementation, which would not see the caches."""
        for config in self._configs:
            if config._attn_implementation != NAME:
                raise RuntimeError(
                    f"the model's layers attend by {config._attn_implementation!r}, which neither reads nor writes "
                    f"these caches; call model.set_attn_implementation({NAME!r})"
                )

    def _refuse_states(self, what: str) -> None:
        """ValueError that begins with ``what`` where the model has recurrent layers, which run request by request."""
        if self.states is not None:
            raise ValueError(
                f"{what}: the model has recurrent layers, which run request by request, as each step's host says; run "
                "it eagerly, and its decodes in graphs of whole steps"
            )

    def _refuse_made_sinks(self, what: str) -> None:
        """ValueError that begins with ``what`` where layers make their sinks anew, which only eager ones hand over."""
        for name in sorted(self._passes_sinks):
            raise ValueError(
                f"{what}: the sinks of layer {name} are no parameter or buffer of it, but made in each forward pass, "
                "or replaced since attention_layers(model); make them a parameter, and the caches anew, or run the "
                "model eagerly"
            )


def check_caches(kv_caches: Any) -> None:
    """TypeError for what ``paged_caches`` has not made."""
    if not isinstance(kv_caches, PagedCaches):
        raise TypeError(f"kv_caches: a {type_name(kv_caches)} found; give what paged_caches returns")


def address_of_cache(cache: Any) -> int:
    """Where a cache, or the keys of a pair, begin."""
    return int((cache if isinstance(cache, Tensor) else cache[0]).data_ptr())


def paged_caches(
    model: Any,
    backend: AttentionBackend,
    num_blocks: int,
    *,
    layers: tuple[ModelLayer, ...] | None = None,
    num_slots: int | None = None,
    shared: bool = True,
    plain_prefill: PlainPrefill | None = None,
) -> PagedCaches:
    """A cache of ``num_blocks`` blocks for every attention layer, on the backend's device, and the layers themselves.

    A layer that is not causal has no cache. One that attends over the keys of a layer before it (``reads_cache_of``, as
    in Gemma 3n) has the cache of that layer, and writes nothing; with ``shared`` False, and where caches are fp8, whose
    scales are a layer's own, it has one of its own. A model with recurrent layers (``recurrent_layers``) needs
    ``num_slots``, the null slot included: each of them has so many states, and steps are those of a batch with a
    StateGroup. ``plain_prefill``, what the function of that name made for the same model, runs long prompts of latent
    layers by keys and values of every head, in eager steps of layers that are not compiled.

    ValueError where the backend refuses what a layer asks for, where ``num_slots`` is missing, or given for a model
    without such layers, and for ``plain_prefill`` where a layer is not latent, or its backend is one ``over_ranks``.
    """
    check_backend(backend)
    num_slots = optional_integer("num_slots", num_slots, 2)
    recurrent = recurrent_layers(model)
    if recurrent and num_slots is None:
        raise ValueError(
            f"num_slots: missing; {type(model).__name__} has {counted(len(recurrent), 'recurrent layer')}, whose "
            "states need slots: one for each request, and the null slot"
        )
    if num_slots is not None and not recurrent:
        raise ValueError(f"num_slots: {num_slots} given, but {type(model).__name__} has no recurrent layer")
    layers = attention_layers(model) if layers is None else layers
    for layer in layers:
        if layer.use_mla:
            check_absorbed(layer.name, layer.module)
    plain = None if plain_prefill is None else _plain_layers(plain_prefill, backend, layers)
    shared = flag("shared", shared) and not backend.config.kv_cache_dtype.startswith("fp8")
    made: dict[str, AttentionImpl] = {}
    impls: dict[str, Any] = {}
    caches: dict[str, Any] = {}
    for layer in layers:
        try:
            made[layer.name] = impls[layer.name] = backend.impl(
                layer.name,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                logits_soft_cap=layer.logits_soft_cap,
                sinks=layer.sinks,
                attn_type=layer.attn_type,
            )
        except ValueError as error:
            raise ValueError(f"layer {layer.name}: {error}") from None
        causal = layer.attn_type is AttentionType.DECODER
        if shared and layer.reads_cache_of in caches:
            impls[layer.name] = _Reader(impls[layer.name])
            caches[layer.name] = caches[layer.reads_cache_of]
        else:
            caches[layer.name] = backend.allocate_kv_cache(num_blocks) if causal else None
    states = StateCaches(model, num_slots) if num_slots is not None else None
    found = PagedCaches(impls, caches, {layer.module: layer.name for layer in layers}, states, plain)
    for layer in layers:
        if layer.use_mla:
            found._absorbed.add(layer.name, layer.module)
        if layer.sinks is not None:
            found._follow_sinks(layer, made[layer.name])
    return found


def _plain_layers(given: Any, backend: AttentionBackend, layers: tuple[ModelLayer, ...]) -> PlainLayers:
    if not isinstance(given, PlainPrefill):
        raise TypeError(f"plain_prefill: a {type_name(given)} found; give what plain_prefill(model) returns")
    if not backend.config.use_mla or not all(layer.use_mla for layer in layers):
        raise ValueError("plain_prefill: given for layers without latent caches; call use_latent_caches(model) first")
    if hasattr(backend, "ranks"):
        raise ValueError("plain_prefill: given for a backend over ranks, which hold parts of a context; leave it out")
    return PlainLayers(given, backend, layers)


def attncore_context(metadata: Any, kv_caches: PagedCaches) -> AbstractContextManager[None]:
    """Around a forward pass: its layers attend by ``metadata`` over ``kv_caches``.

    The model runs all tokens of the step as one row: ``model(input_ids=(1, T), position_ids=(1, T), use_cache=False)``,
    T = ``metadata.num_tokens`` or more. ``metadata`` may be a mapping of layer names to metadata, where layers belong
    to several KV-cache groups. Recurrent layers take the requests of the step one by one, and continue the states of
    its group of states, so that a step runs once: a second forward pass continues the states behind the first.
    RuntimeError where the model's attention implementation is not ``attncore``, and where such a model's step has no
    group of states, or would continue states of a forward pass that failed.

    ValueError on entering where a ``kv_b_proj`` was given an adapter or a hook, and cannot be absorbed any more.

    Layers attend by the sinks that the model's parameters have when the context is entered. Inside a capture it is the
    graph that reads them: it follows what is written to them in place, and has to be captured anew where the model is
    given other tensors, as for its other weights.
    """
    check_caches(kv_caches)
    kv_caches._check_called()
    return running_over(metadata, kv_caches.impls, kv_caches)


@contextmanager
def running_over(metadata: Any, impls: Mapping[str, AttentionImpl], kv_caches: PagedCaches) -> Iterator[None]:
    """``attncore_context`` by ``impls``: for layers that call Python and for those that call the operator."""
    if impls is kv_caches.impls:  # a step, and no run of what stands in for them
        kv_caches._follow_weights()
    context = ForwardContext(metadata, impls, kv_caches._by_address)
    around = nullcontext() if kv_caches.states is None else kv_caches.states.running(metadata)
    hooks = guards_for_hooks(4 * kv_caches.num_uncached) if kv_caches._compiled else nullcontext()
    with context, attending_by(_CachedAttention(context, kv_caches)), around, hooks:
        yield


class guards_for_hooks:  # noqa: N801  (a context manager; one of a generator takes twice as long)
    """Has torch.compile tell layers that share a graph apart by their hooks, too: by default it looks at no hook. And
    has it make ``more`` graphs of one function than it does otherwise: layers without a cache share none. Each has one
    for one token and one for more, and as many again where steps give the model other keywords.
    """

    def __init__(self, more: int) -> None:
        self._more = more

    def __enter__(self) -> None:
        config = torch._dynamo.config
        self._before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
        if self._more:
            self._limit = config.recompile_limit
            config.recompile_limit = self._limit + self._more

    def __exit__(self, *error: object) -> None:
        config = torch._dynamo.config
        config.skip_nnmodule_hook_guards = self._before
        if self._more:
            config.recompile_limit = self._limit


class _Reader:
    """The implementation of a layer that attends over the cache of a layer before it, which has written the keys."""

    def __init__(self, impl: AttentionImpl) -> None:
        self._impl = impl

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, metadata: Any, output: Tensor | None = None
    ) -> Tensor:
        """As ``AttentionImpl.forward``, and writes nothing."""
        return self._impl.forward(query, key, value, kv_cache, metadata, output, write=False)


class NoAttention:
    """In place of a layer's implementation, in runs that are none of a step: reads and writes no cache."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, metadata: Any, output: Tensor | None = None
    ) -> Tensor:
        """Zeros."""
        if output is None:
            output = query.new_empty((*query.shape[:2], value.shape[2]))
        return output.zero_()


def running_caches() -> PagedCaches | None:
    """The caches of this thread's forward pass."""
    attender = current_attender()
    return attender.caches if isinstance(attender, _CachedAttention) else None


class _CachedAttention(Attender):
    """An Attender over a model's caches: each layer by its own implementation."""

    __slots__ = ("_layers", "caches")

    def __init__(self, layers: ForwardContext, caches: PagedCaches) -> None:
        self._layers, self.caches = layers, caches

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        name = self._name_of(module)
        impl, metadata = self._layers.layer(name)
        if name in self.caches._passes_sinks and impl is self.caches.impls[name]:
            impl.set_sinks(asked["s_aux"])
        return impl.forward(query, key, value, self.caches._caches[name], metadata)

    def attend_latent(
        self, module: Any, latent: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]
    ) -> Tensor:
        if (plain := self.caches._plain) is not None:
            name = self._name_of(module)
            impl, metadata = self._layers.layer(name)
            if impl is self.caches.impls[name] and (step := plain.step(metadata)) is not None:
                cache = self.caches._caches[name]
                return plain.attend(name, latent, impl, cache, step, metadata, query, key, value)
        return super().attend_latent(module, latent, query, key, value, asked)

    def _name_of(self, module: Any) -> str:
        name: str | None = self.caches._names.get(module)
        if name is None:
            raise RuntimeError(
                f"{type(module).__name__}: this layer has no cache in the context; make kv_caches of the same model"
            )
        return name
