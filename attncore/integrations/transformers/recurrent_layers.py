"""The recurrent layers of a model over slots of states: each request of a step by itself, by the layer's own code.

A layer of transformers that keeps a state (Mamba, Mamba-2, gated delta nets) takes the tokens of whole requests, as
rows of a batch, and a cache with the states of these rows. A step of attncore is one row with the tokens of all
requests. In a forward pass over paged caches a layer therefore runs as often as there are prefills, each over the
tokens of one, and once more over all decodes as rows of one token; its cache is the slots of these requests. A layer
whose code begins anew wherever it is given more than one token (Mamba) takes later chunks of a prompt token by token,
and one whose code runs several rows otherwise than each alone (Falcon-H1 with a norm of its own) takes the decodes one
by one.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from attncore.integrations.transformers.attention_interface import check_one_row, using_attncore
from attncore.integrations.transformers.checked_model import check_model
from attncore.show import counted

_CACHES = ("cache", "cache_params")
"""What the argument of a recurrent layer's ``forward`` that is the model's cache is called: the second in transformers
before 5.24."""
_UPDATES = frozenset(("update_conv_state", "update_recurrent_state"))
"""What code that keeps states calls of the cache."""

_KINDS = ("conv_states", "recurrent_states")

RECURRENT_LAYER_TYPES = frozenset(("linear_attention", "hybrid"))
"""The layer types of a configuration with a state that its own code keeps in a cache: these layers, as modules."""


def recurrent_layers(model: Any) -> dict[str, Any]:
    """The modules of a model that keep a state of each request, by their dotted names; empty: it has none of these."""
    check_model(model)
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and _updates_states(type(module)) and _cache_of(_forward_of(module))  # type: ignore[arg-type]
    }


@functools.cache
def _updates_states(kind: type) -> bool:
    """Whether a method of the class, or of one that it inherits from, writes states: its attention does not."""
    return any(
        not _UPDATES.isdisjoint(inspect.unwrap(method).__code__.co_names)
        for one in kind.__mro__
        for method in vars(one).values()
        if inspect.isfunction(method)
    )


def _cache_of(forward: Callable[..., Any]) -> str:
    """The name of the argument of ``forward`` that is the cache; empty where it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHES if name in parameters), "")


def _forward_of(module: Any) -> Callable[..., Any]:
    """The module's own ``forward``, also where ``StateCaches`` has put another in its place."""
    forward = module.forward
    return forward.original if isinstance(forward, _ByRequest) else forward


def _as_rows(said: Tensor, count: int, size: int) -> Tensor:
    """What a layer's code says of ``count`` tokens, as (count, size): some leaves out the axis of the tokens where a
    row has one. ValueError where it says something else.
    """
    if said.numel() != count * size or said.shape[-1] != size:
        raise ValueError(
            f"model: a recurrent layer gives {tuple(said.shape)} for {counted(count, 'token')} of {size} numbers, so "
            "that attncore cannot run it"
        )
    return said.reshape(count, size)


class _Layer(Cache):
    """A cache with the states of some rows of one layer, as that layer's code knows caches."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layers=[layer])
        self.layers: Any = _AnyIndex(layer)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As Cache's, which looks for the last of the model's layers where ``layer_idx`` is None."""
        known = self.layers.layer.has_previous_state
        return all(known.values()) if state_idx is None else bool(known[state_idx])


class _AnyIndex:
    """In place of the list of a model's layers: whoever asks is the one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, _: int) -> Any:
        return self.layer


class _Slots:
    """The states of one layer: of each of its kinds a tensor of ``num_slots`` rows, slot 0 that of padded rows."""

    def __init__(self, seen: Any, num_slots: int) -> None:
        self.continues_prompts = False
        """Whether the layer's code runs a later chunk of a prompt at once; False: it does so token by token."""
        self.batches_decodes = False
        """Whether the layer's code runs the decodes of several requests at once; False: it does so one by one."""
        self._number, self._kernel_size = seen.number_of_states, dict(seen.conv_kernel_size)
        self.kinds: dict[str, dict[int, Tensor]] = {
            kind: {
                index: state.new_zeros((num_slots, *state.shape[1:]))
                for index, state in getattr(seen, kind).items()
                if state is not None
            }
            for kind in _KINDS
        }

    def find_out(self, forward: Callable[..., Tensor], size: int, **like: Any) -> None:
        """Sees whether the layer's code continues a state with several tokens, which Mamba's does with one alone: two
        tokens say the same then, whatever the state. And whether it says of two rows what it says of each alone.
        """
        tokens = torch.linspace(-1, 1, 2 * size, **like).view(1, 2, size)
        said = [self._said(forward, tokens, value) for value in (0, 1)]
        self.continues_prompts = not torch.equal(*said)
        rows = tokens.transpose(0, 1)
        alone = torch.cat([_as_rows(self._said(forward, rows[row : row + 1], row), 1, size) for row in (0, 1)]).float()
        try:
            together = _as_rows(self._said(forward, rows, 0, 1), 2, size).float()
        except (RuntimeError, ValueError):  # of shapes that do not go together
            return
        largest = float(alone.abs().max())  # far more than rounding, and far less than the state of another request
        self.batches_decodes = torch.allclose(together, alone, rtol=0.05, atol=0.05 * largest)

    def _said(self, forward: Callable[..., Tensor], tokens: Tensor, *values: int) -> Tensor:
        """What the layer's code says of rows of tokens behind recurrent states that are full of ``values``."""
        cache = self.cache(lambda state: state.new_zeros((len(values), *state.shape[1:])), True)
        for held in filter(torch.is_tensor, cache.layers.layer.recurrent_states.values()):
            for row, value in enumerate(values):
                held[row] = value
        return forward(tokens, **{_cache_of(forward): cache})

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for states in self.kinds.values() for state in states.values())

    def cache(self, take: Callable[[Tensor], Tensor], has_state: bool) -> _Layer:
        """A cache of the rows that ``take`` takes of each state."""
        layer = LinearAttentionLayer(number_of_states=self._number)
        layer.conv_kernel_size = self._kernel_size
        layer.has_previous_state = dict.fromkeys(range(self._number), has_state)
        for kind, states in self.kinds.items():
            held, known = getattr(layer, kind), getattr(layer, f"is_{kind}_initialized")
            for index, state in states.items():
                held[index], known[index] = take(state), True
        return _Layer(layer)

    def write(self, slots: Tensor, cache: _Layer) -> None:
        """Writes the rows of a cache to ``slots``."""
        for kind, states in self.kinds.items():
            for index, state in states.items():
                state.index_copy_(0, slots, getattr(cache.layers.layer, kind)[index].to(state.dtype))


class StateCaches:
    """The states of a model's recurrent layers in ``num_slots`` slots, on the model's device. Made by ``paged_caches``.

    The model runs one token to see what each layer keeps. ValueError where a layer keeps a state that is none of
    ``recurrent_layers``.
    """

    def __init__(self, model: Any, num_slots: int) -> None:
        layers = recurrent_layers(model)
        seen = _seen_cache(model)
        others = sorted(set(seen) - {module.layer_idx for module in layers.values()})
        if others or len(layers) != len(seen):
            raise ValueError(
                f"model: {type(model).__name__} keeps states in {counted(len(seen), 'layer')}, but "
                f"{counted(len(layers), 'module')} of it take a cache of states; attncore cannot run it"
            )
        self.num_slots = num_slots
        self._lost: set[int] = set()
        """Slots of requests whose step failed after layers had run."""
        self._slots = {module: _Slots(seen[module.layer_idx], num_slots) for module in layers.values()}
        with torch.no_grad():
            for module, slots in self._slots.items():
                size = model.config.get_text_config().hidden_size
                # A parameter of the layer's own may have another dtype than what goes through the model (A_log).
                like = {"dtype": model.dtype, "device": next(module.parameters()).device}
                slots.find_out(_forward_of(module), size, **like)
        for module in layers.values():
            module.forward = _ByRequest(module, _forward_of(module))

    @property
    def nbytes(self) -> int:
        """Memory of the states, bytes."""
        return sum(slots.nbytes for slots in self._slots.values())

    @contextmanager
    def running(self, metadata: Any) -> Iterator[None]:
        """Inside, the recurrent layers that this thread runs continue the states of the step's requests.

        Where that fails, layers that ran have states behind the step, and the others before it: RuntimeError for a
        later step that would continue one of them.
        """
        step = _Step(self._slots, metadata)
        lost = sorted(self._lost.intersection(step.continued))
        if lost:
            raise RuntimeError(
                f"metadata: a forward pass failed that had changed states in slot {lost[0]}; preempt the request that "
                "has it and run it again from its first token"
            )
        before, _current.step = _current.step, step
        try:
            yield
        except BaseException:
            if step.has_run:
                self._lost |= step.written
            raise
        else:
            self._lost -= step.written
        finally:
            _current.step = before


def nbytes_of_states(model: Any, num_tokens: int = 1) -> int:
    """Bytes of the states of one request, seen in a run of ``num_tokens`` tokens."""
    kinds = [getattr(layer, kind) for layer in _seen_cache(model, num_tokens).values() for kind in _KINDS]
    return sum(state.nbytes // len(state) for states in kinds for state in states.values() if state is not None)


def _seen_cache(model: Any, num_tokens: int = 1) -> dict[int, Any]:
    """The layers of the cache that the model makes of some tokens, by index, as far as they keep states."""
    tokens = torch.zeros((1, num_tokens), dtype=torch.int64, device=model.device)
    with using_attncore(model, "eager"), torch.no_grad():
        output = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values if hasattr(output, "past_key_values") else output.cache
    return {
        index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)
    }


class _Current(threading.local):
    step: _Step | None = None


class _Step:
    """The step of a forward pass, as recurrent layers run it."""

    def __init__(self, slots: dict[Any, _Slots], metadata: Any) -> None:
        metadata = next(iter(metadata.values())) if isinstance(metadata, Mapping) else metadata
        known = getattr(metadata, "states", None)
        if not known:
            raise RuntimeError(
                "metadata: this step has no group of states, and the model has recurrent layers; make the batch with "
                "groups=[KVCacheGroup(...), StateGroup(...)]"
            )
        if len(known) > 1:
            raise ValueError(f"metadata: groups of states {', '.join(known)}; a model of transformers has one")
        (states,) = known.values()
        slots_on_host, continues = states.host.state_slot, states.host.has_initial_state
        self.has_run = False
        """Whether a layer has run, and with that may have written states."""
        self.written, self.continued = set(slots_on_host.tolist()) - {0}, slots_on_host[continues].tolist()
        self._slots, self._num_tokens = slots, metadata.num_tokens
        self._num_decodes = metadata.num_decode_tokens  # of one token each: more are drafts, which states refuse
        self._decodes = states.state_slot[: self._num_decodes].long()
        self._continues = states.has_initial_state[: self._num_decodes]
        self._prefills: list[tuple[int, int, int, bool]] = []
        if metadata.num_prefills:
            starts = states.host.query_start_loc.tolist()
            rows = zip(slots_on_host.tolist(), continues.tolist(), strict=True)
            bounds = zip(starts, starts[1:], rows, strict=False)
            self._prefills = [(a, b, *row) for a, b, row in list(bounds)[metadata.num_decodes :]]

    def run(self, module: Any, forward: Callable[..., Tensor], tokens: Tensor, asked: dict[str, Any]) -> Tensor:
        """The layer over the step's tokens (1, T, size): the result has the same shape, zeros behind the step's."""
        slots = self._slots.get(module)
        if slots is None:
            raise RuntimeError(
                f"{type(module).__name__}: this layer has no states in the context; make kv_caches of the same model"
            )
        if tokens.shape[1] < self._num_tokens:
            raise ValueError(
                f"input_ids: {counted(tokens.shape[1], 'token')} found; the step has {self._num_tokens}: give each"
            )
        parts, self.has_run, argument, width = [], True, _cache_of(forward), tokens.shape[2]
        at_once = max(self._num_decodes if slots.batches_decodes else 1, 1)
        for first in range(0, self._num_decodes, at_once):
            some = slice(first, first + at_once)
            cache = slots.cache(lambda state, some=some: self._of_decodes(state, some), True)  # type: ignore[misc]
            rows = tokens[0, : self._num_decodes, None][some]
            parts.append(_as_rows(forward(rows, **asked, **{argument: cache}), len(rows), width))
            slots.write(self._decodes[some], cache)
        for start, stop, slot, continues in self._prefills:
            # A slice: the layer's code writes the state behind these tokens to the slot itself.
            cache = slots.cache(lambda state, slot=slot: state[slot : slot + 1], continues)  # type: ignore[misc]
            size = stop - start if slots.continues_prompts or not continues else 1
            for first in range(start, stop, size):
                chunk = tokens[:, first : min(first + size, stop)]
                parts.append(_as_rows(forward(chunk, **asked, **{argument: cache}), chunk.shape[1], width))
        if (behind := tokens.shape[1] - self._num_tokens) or not parts:
            parts.append(tokens.new_zeros((behind, tokens.shape[2])))
        return torch.cat(parts)[None]

    def _of_decodes(self, state: Tensor, some: slice) -> Tensor:
        """The states of some decodes; zeros for a request that begins, whose slot may hold anything."""
        rows = state[self._decodes[some]]
        return torch.where(self._continues[some].view(-1, *[1] * (rows.ndim - 1)), rows, 0)


_current = _Current()


class _ByRequest:
    """In place of a recurrent layer's ``forward``: the step's requests one by one, or outside of a step the same."""

    def __init__(self, module: Any, original: Callable[..., Tensor]) -> None:
        self._module, self.original = module, original
        self._argument = _cache_of(original)

    def __call__(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Any = None,
        *,
        cache_params: Any = None,
        **asked: Any,
    ) -> Tensor:
        if _current.step is None:
            cache = cache_params if cache is None else cache
            return self.original(hidden_states, **{self._argument: cache}, attention_mask=attention_mask, **asked)
        # Before states change: a layer of attention would say so behind them, and they cannot be taken back.
        check_one_row(hidden_states, attention_mask)
        return _current.step.run(self._module, self.original, hidden_states, asked)
