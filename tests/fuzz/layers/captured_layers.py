"""All layers of a program in one captured graph, whose inputs lie where each replay reads them."""

from __future__ import annotations

from typing import Any

import torch
from fuzz.layers.caches import Numbers
from fuzz.layers.settings import Layer, Settings
from torch import Tensor

from attncore.graphs import capturing, launch, new_graph


class CapturedLayers:
    def __init__(
        self, metadata: Any, layers: list[tuple[Layer, Any]], caches: dict[tuple[str, int], Any], settings: Settings,
        numbers: Numbers, each: int | None, with_lse: bool, before: CapturedLayers | None = None,
    ) -> None:  # fmt: skip
        """``metadata`` is what ``capture`` gave; ``each``: the tokens of a row, None where rows are of any length.
        ``before``: the step ahead of this one in the same graph, which runs these layers, too."""
        self.numbers, self.each, tokens = numbers, each, metadata.num_tokens

        def zeros(heads: int, size: int) -> Tensor:
            return torch.zeros(tokens, heads, size, dtype=numbers.dtype, device=numbers.device)

        mine = [settings.of(layer.group) for layer, _ in layers]
        self.queries = [zeros(one.heads, one.head_size) for one in mine]
        self.new = {}
        for key in caches:
            one = settings.of(key[0])
            self.new[key] = [zeros(one.kv_heads, size) for size in (one.head_size, one.value_size)]
        self.outputs = [zeros(one.heads, one.value_size) for one in mine]
        self.graph = new_graph(numbers.device)
        self.before = before

        def run(number: int) -> Tensor:
            layer, impl = layers[number]
            keys, values = self.new[layer.group, layer.cache]
            given = (keys, None if mine[number].latent else values) if layer.writes else (None, None)
            if layer.group == "cross":  # encoder tokens do not fit a captured size
                given = None, None
            method = impl.forward_with_lse if with_lse else impl.forward
            returned = method(
                self.queries[number], *given, caches[layer.group, layer.cache], metadata.groups[layer.group],
                self.outputs[number], write=layer.writes,
            )  # fmt: skip
            return returned[1] if with_lse else returned

        self.with_lse, self._run = with_lse, run
        for number in range(len(layers)):
            launch(run, number)  # a warm-up, over an empty step
        with capturing(self.graph):
            metadata.record()
            if before is not None:
                before.sums_before = [launch(before._run, number) for number in range(len(layers))]
                metadata.record_next()
            self.sums = [launch(run, number) for number in range(len(layers))]

    def run(
        self, built: Any, queries: list[Tensor], new: dict[tuple[str, int], list[Tensor]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Output and perhaps log-sum-exp of each layer for what was ``built`` for this size, a step or the next of the
        steps ahead; padding holds NaN."""
        self._fill(queries, new)
        built.replay(self.graph)
        return self._found(len(queries[0]), self.sums)

    def run_both(
        self, steps: Any, queries: list[list[Tensor]], new: list[dict[tuple[str, int], list[Tensor]]]
    ) -> list[list[tuple[Tensor, Tensor | None]]]:
        """``run`` of the next two of the steps ahead, in one graph."""
        assert self.before is not None
        self.before._fill(queries[0], new[0])
        self._fill(queries[1], new[1])
        steps.replay(self.graph, 2)
        count = len(queries[0][0])
        return [self.before._found(count, self.before.sums_before), self._found(count, self.sums)]

    def _fill(self, queries: list[Tensor], new: dict[tuple[str, int], list[Tensor]]) -> None:
        count = len(queries[0])
        for held, fresh in [
            *zip(self.queries, queries, strict=True),
            *((one, other) for key, both in self.new.items() if key[0] != "cross"
              for one, other in zip(both, new[key], strict=True)),
        ]:  # fmt: skip
            held[:count] = self.numbers.sent(fresh)
            held[count:] = float("nan")

    def _found(self, count: int, sums: list[Any]) -> list[tuple[Tensor, Tensor | None]]:
        found = [output[:count].clone() for output in self.outputs]
        return [(output, of_sums[:count].clone() if self.with_lse else None) for output, of_sums in
                zip(found, sums, strict=True)]  # fmt: skip
