"""An engine that runs each step by every method of its layer: what one does right, another may not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.testing.engines.adopting_builder import AdoptingEngine
from attncore.testing.engines.compare import check_output
from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError, told

if TYPE_CHECKING:
    from attncore.builder import CommonAttentionMetadata
    from attncore.testing.engines.compare import StepRequest

INTO = "forward(..., output)"
READS = "forward(..., write=False)"
LOGARITHMS = "forward_with_lse"


class EveryMethodEngine(Engine):
    """Each step runs by ``forward``; ``write_cache`` then has to leave the cache that it left; ``forward`` with
    an ``output``, or with ``write=False``, without key and value, and ``forward_with_lse``, where the spec declares
    ``lse``, with and without writing, have to give the same numbers.

    Steps of the list builder, of which some rows bring keys that have no slot, run by ``forward`` alone, with and
    without an ``output``; ``fill`` without.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        spec = self.config.spec
        self._has_lse = spec is not None and "lse" in spec.features
        self._filling = False
        self._other_cache = False  # whether write_cache left another than forward
        self._others: dict[str, tuple[Tensor, Tensor | None]] = {}  # method -> output, log-sum-exp

    def fill(self, contexts: Mapping[Any, int]) -> None:
        """Compute the first tokens of requests, by ``forward``."""
        self._filling = True
        super().fill(contexts)
        self._filling = False

    def forward(self, tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """The output of ``forward``; the others' are kept for the comparison."""
        query, *new = tensors
        self._others, self._other_cache = {}, False
        if self._filling:
            return super().forward((query, *new), metadata)
        if metadata.from_groups:
            output = super().forward((query, *new), metadata)
            self._others[INTO] = self._into(output, query, new, metadata), None
            return output
        before = self.cache_view.snapshot()
        output = super().forward((query, *new), metadata)
        wanted = self.cache_view.snapshot()
        key, value = (new[0], None if self.config.use_mla else new[1]) if len(new[0]) else (None, None)
        with _named("write_cache"):
            if key is not None:
                self.cache_view.restore(before)
                self.impl.write_cache(key, value, self.kv_cache, metadata)
        self._other_cache = not self._is(wanted)
        self.cache_view.restore(wanted)
        self._others[INTO] = self._into(output, query, new, metadata), None
        self._same(wanted, f"{INTO} left another cache than forward does")
        given = (self.kv_cache, metadata)
        with _named(READS):
            self._others[READS] = self.impl.forward(query, None, None, *given, write=False), None
        if self._has_lse:
            with _named(f"{LOGARITHMS}(..., write=False)"):
                answers = self.impl.forward_with_lse(query, None, None, *given, write=False)
                self._others[f"{LOGARITHMS}(..., write=False)"] = answers
            self._same(wanted, "a method with write=False changed the cache")
            with _named(LOGARITHMS):
                self._others[LOGARITHMS] = self.impl.forward_with_lse(query, key, value, *given)
        self._same(wanted, f"{LOGARITHMS} left another cache than forward does")
        return output

    def compare(
        self, answer: Tensor, expected: Any, requests: list[StepRequest], query: Tensor, step: Any = None
    ) -> None:
        """As of any engine, of what each method has given."""
        others, self._others = self._others, {}
        super().compare(answer, expected, requests, query, step)
        if self._other_cache:  # said last: where forward writes a wrong one, its output says more
            raise ConformanceError("write_cache left another cache than forward does")
        for method, (output, lse) in others.items():
            self.lse = lse
            try:
                super().compare(output.cpu(), expected, requests, query)
            except ConformanceError as error:
                raise ConformanceError(f"{method}: {error}", error.max_error) from None
            finally:
                self.lse = None

    def _into(self, found: Tensor, query: Tensor, new: list[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """What ``forward`` writes to an ``output`` that is given, of the shape of the one that it has ``found``."""
        output = torch.full_like(found, torch.nan, memory_format=torch.contiguous_format)
        key, value = new[0], None if self.config.use_mla else new[1]
        with _named(INTO):
            check_output(self.impl.forward(query, key, value, self.kv_cache, metadata, output), output)
        return output

    def _is(self, wanted: list[Tensor]) -> bool:
        return all(map(torch.equal, self.cache_view.snapshot(), wanted))

    def _same(self, wanted: list[Tensor], otherwise: str) -> None:
        if not self._is(wanted):
            raise ConformanceError(otherwise)


class EveryMethodCrossEngine(EveryMethodEngine, CrossEngine):
    """The same of a cross layer, whose keys are an encoder's."""


class EveryMethodAdoptingEngine(EveryMethodEngine, AdoptingEngine):
    """The same of steps that are made of an engine's own tensors."""


@contextmanager
def _named(method: str) -> Iterator[None]:
    """Errors of the backend's say which method raised."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{method}: {told(error)}") from error
