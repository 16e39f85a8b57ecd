"""Attention that is not causal, where the spec declares ``encoder`` or ``encoder_decoder``."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from attncore.testing.engines.encoder_engine import EncoderEngine
from attncore.testing.engines.run_long_contexts import SPREAD
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, named, require_declared, value_head
from attncore.testing.harness.declared_samples import FEATURES, LONG_FEATURES, in_one_layer, own_scale
from attncore.testing.harness.draw_batches import explore, lengths
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES

__all__ = [
    "test_a_feature_of_an_encoder",
    "test_an_encoder_in_a_dtype",
    "test_an_encoder_of_the_persistent_builder",
    "test_an_encoder_over_long_rows",
    "test_an_encoder_over_random_rows",
    "test_an_encoder_with_a_value_head",
    "test_an_encoder_writes_no_cache",
]
ENCODERS = ("encoder", "encoder_only")
LONG_ROWS = [1, 150, 17, 4]
"""Of more tokens than a tile has, too."""
LONGER_ROWS = [3, 1030, 1, 530]
"""Beyond the lengths at which kernels begin to split a row's keys."""


@covers("encoder")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_over_random_rows(attncore_subject: Subject, attncore_examples: int, kind: str) -> None:
    """Every token sees all of its row, and no other; without a cache; tensors may be longer than the metadata. The
    scale is the layer's."""
    attncore_subject.require("encoder")
    backend = attncore_subject.backend()
    scale = own_scale(backend)

    def check(rows: list[int], extra: int, seed: int) -> None:
        EncoderEngine(backend, kind, seed=seed, scale=scale).encode(rows, extra=extra)

    rows = st.lists(lengths(backend.config.block_size), min_size=1, max_size=5)
    explore(check, attncore_examples, rows=rows, extra=st.integers(0, 3), seed=st.integers(0, 999))


@covers("encoder")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_writes_no_cache(attncore_subject: Subject, kind: str) -> None:
    """A cache that is handed over all the same stays as it is."""
    attncore_subject.require("encoder")
    EncoderEngine(attncore_subject.backend(), kind, junk=math.nan).encode([5, 1, 9], cached=True)


@covers("encoder")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_of_the_persistent_builder(attncore_subject: Subject, kind: str) -> None:
    """Rows have tables and slots there, as layers beside this one need them: none of them is read, nor what lies in the
    blocks, NaN; with a cache and without."""
    attncore_subject.require("encoder")
    backend = attncore_subject.backend()
    for cached in (False, True):
        engine = EncoderEngine(backend, kind, junk=math.nan)
        engine.encode([9, 1, 2 * backend.config.block_size + 1, 4], cached=cached, persistent=True)


@covers("encoder")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_an_encoder(attncore_subject: Subject, feature: str) -> None:
    """With a window, that is symmetric: fewer than so many positions away; slopes count the absolute distance."""
    for name in ("encoder", feature):
        attncore_subject.require(name)
    backend = attncore_subject.backend()
    for kind in ENCODERS:
        EncoderEngine(backend, kind, **FEATURES[feature]).encode([1, 9, 17, 4])


@covers("encoder")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Rows of up to 150 tokens, without a feature and with all that are declared, and their log-sum-exp where it is."""
    attncore_subject.require("encoder")
    require_declared(dtype, attncore_subject.form.dtypes)
    backend = attncore_subject.backend(dtype=dtype)
    declared = features_of(backend)
    for kind in ENCODERS:
        for features in ({}, in_one_layer(declared)):
            EncoderEngine(backend, kind, **features).encode(LONG_ROWS)
            if "lse" in declared:
                EncoderEngine(backend, kind, with_lse=True, **features).encode(LONG_ROWS)


@covers("encoder")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_over_long_rows(attncore_subject: Subject, kind: str) -> None:
    """A row of 1,030 tokens beside short ones, without a feature and with all that are declared, and their
    log-sum-exp where it is."""
    attncore_subject.require("encoder")
    backend = attncore_subject.backend()
    declared, scale = features_of(backend), SPREAD * backend.config.head_size**-0.5
    for features in ({}, in_one_layer(declared, LONG_FEATURES)):
        for with_lse in sorted({False, "lse" in declared}):
            EncoderEngine(backend, kind, with_lse=with_lse, scale=scale, **features).encode(LONGER_ROWS)


@covers("encoder")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_with_a_value_head(attncore_subject: Subject, kind: str) -> None:
    """Values of another size than keys, without a feature and with all, and their log-sum-exp where it is declared."""
    attncore_subject.require("encoder")
    backend = attncore_subject.backend(head_size_v=value_head(attncore_subject))
    declared = features_of(backend)
    with named("a value head"):
        for features in ({}, in_one_layer(declared)):
            for with_lse in sorted({False, "lse" in declared}):
                EncoderEngine(backend, kind, with_lse=with_lse, **features).encode([1, 9, 17, 4])
