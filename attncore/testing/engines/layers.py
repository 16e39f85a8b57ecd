"""Several layers in the steps of one engine: each with features and a cache of its own, one plan a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.random_tensors import RandomTensors
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.errors import ConformanceError, told

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend


class Layers:
    """Runs steps of a model whose layers differ: ``features`` has the arguments of ``backend.impl`` for each.

    The first engine's builder builds the steps; the others hold the same requests in the same blocks. Each layer has
    queries, keys and values of its own: what one makes of a cache and keeps with the step is not another's.
    """

    def __init__(self, backend: AttentionBackend, features: Sequence[Mapping[str, Any]]) -> None:
        self.backend = backend
        self.engines = [Engine(backend, **given) for given in features]
        backend.forget_layers()  # each engine forgets the layers of those before it
        for number, engine in enumerate(self.engines):
            engine.impl = backend.impl(f"layers.{number}", **engine.features)
            random = np.random.default_rng(number)
            engine.drawn = RandomTensors(engine.config, engine.features, random, number, on_grid=engine.grid)
            layers = [(f"layer {other}", layer) for other, layer in enumerate(self.engines)]
            engine.siblings = [(name, layer.features) for name, layer in layers if layer is not engine]
            engine.suspects = [(f"the keys were those of {name}'s cache", one.history) for name, one in layers[:number]]

    def add(self, name: Hashable, tokens: int) -> None:
        """Add a request with blocks for ``tokens`` tokens."""
        for engine in self.engines:
            engine.add(name, tokens)

    def step(self, scheduled: Mapping[Any, int]) -> None:
        """Run a step of every layer, in order; ConformanceError that names the first layer that is wrong."""
        first = self.engines[0]
        built = first.builder.build(first.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], first.context(name)) for name in built.req_ids]
        metadata = planned(self.backend, built)
        for number, engine in enumerate(self.engines):
            try:
                engine.run_step(metadata, requests)
            except Exception as error:
                given = ", ".join(f"{name}={value}" for name, value in engine.features.items())
                raise ConformanceError(
                    f"layer {number} ({given}) of {len(self.engines)} that share a step, and differ: {told(error)}"
                ) from error
