"""The sinks of a model's layers: parameters, of which attncore's layers have copies that follow them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attncore.abstract import AttentionImpl
from attncore.abstract.sinks import write_sinks

if TYPE_CHECKING:
    from torch import Tensor


class ModelSinks:
    """``follow`` names a layer and where its parameter is; ``update`` copies all parameters, as they are then.

    What changed is not looked for: a parameter's version does not count what is written through ``param.data``, as by
    most loaders of weights. One launch for all layers costs less than it would to ask. Inside a capture the copy
    becomes part of the graph, which then follows what is written to the parameters in place.
    """

    def __init__(self) -> None:
        self._places: list[tuple[Mapping[str, Any], str]] = []
        self._layers: list[tuple[str, AttentionImpl]] = []
        self._held: list[Tensor] = []
        self._seen: list[Any] = []
        self._tell: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def follow(self, name: str, impl: Any, parameters: Mapping[str, Any], key: str) -> None:
        """The sinks of ``impl``, a layer that was made with some, are ``parameters[key]``."""
        self._places.append((parameters, key))
        self._layers.append((name, impl))
        self._held.append(impl.sinks)
        self._seen.append(parameters[key])
        if type(impl).sinks_changed is not AttentionImpl.sinks_changed:
            self._tell.append(impl.sinks_changed)

    def update(self) -> None:
        """Called before the layers run; ValueError that names a layer whose parameter has no number for each head."""
        now = self.current()
        if any(map(operator.is_not, now, self._seen)):
            self._replaced(now)
        try:
            write_sinks(self._held, now)
        except RuntimeError:
            self._replaced(now, anew=True)  # which says of what layer the numbers are too few or too many
            raise
        for tell in self._tell:
            tell()

    def are(self, tensors: list[Any]) -> bool:
        """Whether the parameters are still these, which ``current`` gave."""
        return not any(map(operator.is_not, self.current(), tensors))

    def current(self) -> list[Any]:
        """The parameters."""
        return [parameters.get(key) for parameters, key in self._places]

    def _replaced(self, now: list[Any], *, anew: bool = False) -> None:
        """Layers have other tensors, of any dtype and on any device: they are checked as those of ``impl`` are, or all
        ``anew``.
        """
        for (name, impl), sinks, seen in zip(self._layers, now, self._seen, strict=True):
            if sinks is None:
                raise ValueError(f"layer {name}: its sinks are gone from where they were; make the caches anew")
            if anew or sinks is not seen:
                try:
                    impl.set_sinks(sinks)
                except ValueError as error:
                    raise ValueError(f"layer {name}: {error}") from None
        self._seen = now
