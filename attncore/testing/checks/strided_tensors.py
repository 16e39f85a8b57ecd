"""Tensors as engines pass them: parts of larger ones, contiguous in the last dimension only."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from attncore.abstract import AttentionBackend
from attncore.testing.engines.encoder_engine import EncoderEngine
from attncore.testing.engines.every_method_engine import EveryMethodCrossEngine, EveryMethodEngine
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.engines.strided_tensors import LAYOUTS, with_strided_tensors
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import named
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_strided_tensors",
    "test_strided_tensors_of_a_cross_layer",
    "test_strided_tensors_of_a_latent_layer",
    "test_strided_tensors_of_an_encoder",
]


@covers("strided tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors(attncore_subject: Subject, layout: str) -> None:
    """``query``, ``key`` and ``value`` are slices of one fused tensor, or have gaps between their heads; ``output``
    has gaps between its tokens, or its heads, which stay as they are. In mixed steps and decodes, by every method.
    """
    _by_every_method(attncore_subject, attncore_subject.backend(), layout)


@covers("strided tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors_of_a_latent_layer(attncore_subject: Subject, layout: str) -> None:
    """The same over a latent cache, which has keys alone."""
    if attncore_subject.latent is attncore_subject:
        raise UnsupportedError("its other rows run with latent caches")
    _by_every_method(attncore_subject.latent, attncore_subject.latent.backend(use_mla=True), layout)


@covers("strided tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors_of_an_encoder(attncore_subject: Subject, layout: str) -> None:
    """The same of layers without a cache, and of their log-sum-exp where it is declared."""
    attncore_subject.require("encoder")
    backend = attncore_subject.backend()
    for kind in ("encoder", "encoder_only"):
        for with_lse in sorted({False, "lse" in attncore_subject.form.features}):
            with _strided(layout):
                with_strided_tensors(EncoderEngine(backend, kind, with_lse=with_lse), layout).encode([5, 1, 9])


@covers("strided tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors_of_a_cross_layer(attncore_subject: Subject, layout: str) -> None:
    """The same of a layer whose keys are an encoder's: they are fused without the queries, and in decodes not given."""
    attncore_subject.require("encoder_decoder")
    attncore_subject.require_phase("prefill", "decode")
    with _strided(layout):
        engine = with_strided_tensors(EveryMethodCrossEngine(attncore_subject.backend()), layout)
        for name, length in enumerate((5, engine.block_size + 1)):
            engine.add(name, length)
        engine.cross_step({0: 2, 1: 4})
        engine.cross_step({0: 1, 1: 1})


def _by_every_method(subject: Subject, backend: AttentionBackend, layout: str) -> None:
    def make(made_by: AttentionBackend) -> EveryMethodEngine:
        return with_strided_tensors(EveryMethodEngine(made_by), layout)

    with _strided(layout):
        run_around_a_block(subject, backend, make=make)


def _strided(layout: str) -> AbstractContextManager[None]:
    return named(f"strided tensors ({layout}; contiguous in the last dimension only)")
