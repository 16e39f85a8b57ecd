"""An engine whose layer attends without writing: the step's keys and values are put into the cache before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.ops.cache_writer import CacheWriter
from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError, UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata
    from attncore.testing.harness.subject import Subject

WRITERS = ("another layer", "write_cache", "the engine")
"""Who writes the step's keys: a layer before, whose cache is shared; the layer by ``write_cache``; the engine."""


class ReadingEngine(Engine):
    """``written_by`` is one of WRITERS. The layer itself is handed None for key and value, or NaN (``nan``); with
    ``given`` what they are, for steps in which requests have no table.
    """

    def __init__(
        self, backend: AttentionBackend, *, written_by: str, nan: bool = False, given: bool = False, **engine: Any
    ) -> None:
        super().__init__(backend, **engine)
        self.written_by, self.nan, self.given = written_by, nan, given
        self.other = backend.impl("layers.0.writes", **self.features)

    def forward(self, tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """The output for query, key and value on the device, which are written first."""
        query, *new = tensors
        key, value = (None, None) if not len(new[0]) else (new[0], None if self.config.use_mla else new[1])
        if key is not None:
            self._put(query, key, value, metadata)
        before = self.cache_view.snapshot()
        if not self.given:
            key, value = (
                torch.full_like(tensor, torch.nan) if self.nan and tensor is not None else None
                for tensor in (key, value)
            )
        asked = (query, key, value, self.kv_cache, metadata)
        if self.with_lse:
            output, self.lse = self.impl.forward_with_lse(*asked, write=False)
        else:
            output = self.impl.forward(*asked, write=False)
        self._same(before, "forward with write=False changed the cache")
        return output

    def _put(self, query: Tensor, key: Tensor, value: Tensor | None, metadata: CommonAttentionMetadata) -> None:
        if self.written_by == "the engine":
            self._write_as_an_engine(key, value, metadata)
            return
        if self.written_by == "another layer":
            self.other.forward(query * 0.5, key, value, self.kv_cache, metadata)
            return
        before = self.cache_view.snapshot()
        self.other.forward(query, key, value, self.kv_cache, metadata)
        wanted = self.cache_view.snapshot()
        self.cache_view.restore(before)
        self.impl.write_cache(key, value, self.kv_cache, metadata)
        self._same(wanted, "write_cache left another cache than forward does")

    def _write_as_an_engine(self, key: Tensor, value: Tensor | None, metadata: CommonAttentionMetadata) -> None:
        """By the backend's views, which may have any strides; CacheWriter takes those whose rows are contiguous."""
        try:
            views = self.backend.kv_cache_views(self.kv_cache)
        except ValueError as error:
            if not str(error).startswith("kv_cache:"):
                raise
            raise UnsupportedError(str(error)) from error  # an engine cannot write this cache
        keys, values = (view if view.stride(-1) == 1 else view.contiguous() for view in views)
        crosses = self.impl.attn_type == "encoder_decoder"
        slots = metadata.cross_slot_mapping if crosses else metadata.slot_mapping
        CacheWriter()(key, key[..., : values.shape[3]] if value is None else value, keys, values, slots)
        for view, written in zip(views, (keys, values), strict=True):
            if written is not view:
                view.copy_(written)

    def _same(self, wanted: list[Tensor], otherwise: str) -> None:
        for part, old in zip(self.cache_view.snapshot(), wanted, strict=True):
            if not torch.equal(part, old):
                raise ConformanceError(otherwise)


METHODS = ("write=False", "forward_with_lse")
"""Ways to call a layer beside its plain ``forward``."""


def by_method(subject: Subject, method: str, kind: type[Engine], reading: type[ReadingEngine]) -> Any:
    """An engine that calls its layer by one of METHODS: of ``kind``, or of ``reading``, the same without writing."""
    if method == "forward_with_lse":
        subject.require("lse")
        return kind(subject.backend(), with_lse=True)
    return reading(subject.backend(), written_by="write_cache")


def by_every_method(subject: Subject, *, given: bool = False, **engine: Any) -> Iterator[Engine]:
    """Engines of one backend, one after another: of ``forward``, of ``write_cache`` and ``forward(write=False)``, with
    the keys ``given`` where asked, and where it is declared of ``forward_with_lse``.
    """
    backend = subject.backend()
    yield Engine(backend, **engine)
    yield ReadingEngine(backend, written_by="write_cache", given=given, **engine)
    if "lse" in subject.form.features:
        yield Engine(backend, with_lse=True, **engine)


class ReadingCrossEngine(ReadingEngine, CrossEngine):
    """The same of a cross layer, whose keys are an encoder's."""
