"""Latent caches (MLA), and values of a size of their own, where the spec declares them."""

from __future__ import annotations

import math

from attncore.abstract import AttentionBackend
from attncore.show import counted
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.engines.run_batches import (
    run_around_a_block,
    run_drawn_batches,
    run_with_a_copied_block,
)
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import edges
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_latent_attention_over_random_batches",
    "test_latent_attention_reads_only_its_own",
    "test_latent_blocks_are_copied",
    "test_sizes_of_a_value_head",
    "test_the_latent_cache_holds_a_row_a_token",
]
MOST = 256  # of a value head's sizes


def _latent(subject: Subject) -> AttentionBackend:
    if not subject.form.use_mla:
        raise UnsupportedError("its spec does not declare use_mla")
    return subject.backend(use_mla=True)


@covers("latent attention")
def test_latent_attention_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Mixed batches: every query head reads the one latent row of a token, values are its first columns."""
    run_drawn_batches(attncore_subject, _latent(attncore_subject), attncore_examples)


@covers("latent attention")
def test_latent_attention_reads_only_its_own(attncore_subject: Subject) -> None:
    """NaN in all that no token owns (unused rows of last pages too, unless the spec declares ``finite_tail``)."""
    backend = _latent(attncore_subject)
    run_around_a_block(attncore_subject, backend, junk=math.nan)


@covers("latent attention")
def test_the_latent_cache_holds_a_row_a_token(attncore_subject: Subject) -> None:
    """A token owns ``head_size`` elements and no more than alignment adds: no copy of keys, none of values."""
    backend = _latent(attncore_subject)
    size = backend.config.head_size
    elements = CacheView(backend, backend.allocate_kv_cache(2), 2).elements_of_a_token
    if not size <= elements < 2 * size:
        raise ConformanceError(f"a token owns {counted(elements, 'element')} of its block; its latent row has {size}")


@covers("latent attention")
def test_latent_blocks_are_copied(attncore_subject: Subject) -> None:
    """A request whose block was copied and replaced goes on with the copy."""
    attncore_subject.require_phase("decode")
    run_with_a_copied_block(_latent(attncore_subject))


@covers("value head size")
def test_sizes_of_a_value_head(attncore_subject: Subject) -> None:
    """Values of another size than keys, at the edges of what head_size_v declares."""
    form = attncore_subject.form
    if form.head_size_v is None:
        raise UnsupportedError("its spec says that it is the query's")
    if form.mla_only:
        raise UnsupportedError("it runs latent attention only, whose values are a part of the keys")
    base = attncore_subject.request().head_size
    refused, tried = [], 0
    for size in [size for size in edges(form.head_size_v, MOST) if size != base]:
        try:
            backend = attncore_subject.backend(head_size_v=size)
        except UnsupportedError as error:
            refused.append(f"head_size_v {size}: {error}")
            continue
        tried += 1
        try:
            run_around_a_block(attncore_subject, backend)
        except Exception as error:
            raise ConformanceError(f"the spec declares head_size_v {size}, but: {told(error)}") from error
    if not tried:
        raise UnsupportedError("; ".join(refused) or "its spec declares no size but the query's")
