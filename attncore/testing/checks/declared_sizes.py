"""The sizes that the spec declares, at the edges of each set and between: each gives right numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attncore.testing.engines.cross_engine import CrossEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_around_a_block, run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import MAX_SIZE, between, edges, tried
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

__all__ = [
    "test_cross_attention_with_the_usual_head_sizes",
    "test_largest_declared_group",
    "test_smallest_and_largest_declared_block_sizes",
    "test_smallest_and_largest_declared_head_sizes",
    "test_usual_block_sizes_that_are_declared",
    "test_usual_head_sizes_that_are_declared",
]
USUAL_HEAD_SIZES = (24, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)  # of models that are served
USUAL_BLOCK_SIZES = (16, 24, 32, 48, 64, 128, 256)
MAX_FILLED = 64  # filling larger blocks several times takes a backend that only decodes, token by token, too long
NUM_BLOCKS = 16  # for short requests, of a cache whose blocks may be large
BEYOND_A_TILE = 200  # keys: kernels read up to 192 at a time, and the sizes of a head decide how many


@covers("declared head sizes")
def test_smallest_and_largest_declared_head_sizes(attncore_subject: Subject) -> None:
    """The edges of head_sizes give right numbers."""
    _probe(attncore_subject, "head_size", edges(attncore_subject.form.head_sizes, MAX_SIZE))


@covers("declared block sizes")
def test_smallest_and_largest_declared_block_sizes(attncore_subject: Subject) -> None:
    """The edges of block_sizes, and the preferred one, give right numbers."""
    form = attncore_subject.form
    chosen = {*edges(form.block_sizes, MAX_SIZE), *([form.preferred_block_size] if form.preferred_block_size else [])}
    _probe(attncore_subject, "block_size", sorted(chosen))


@covers("declared head sizes")
def test_usual_head_sizes_that_are_declared(attncore_subject: Subject) -> None:
    """The head sizes of models that are served, between the edges of head_sizes; a finite set whole."""
    chosen = between(attncore_subject.form.head_sizes, USUAL_HEAD_SIZES)
    _probe(attncore_subject, "head_size", chosen, small=True)


@covers("encoder_decoder")
def test_cross_attention_with_the_usual_head_sizes(attncore_subject: Subject) -> None:
    """Where every key is seen, kernels read others at a time than with a causal mask. A finite set whole."""
    attncore_subject.require("encoder_decoder")
    declared = attncore_subject.form.head_sizes
    chosen = sorted({*edges(declared, MAX_SIZE), *tried(declared, USUAL_HEAD_SIZES)})
    _try_each(attncore_subject, "head_size", chosen, _run_cross, features=("encoder_decoder",))


@covers("declared block sizes")
def test_usual_block_sizes_that_are_declared(attncore_subject: Subject) -> None:
    """The block sizes that engines use, between the edges of block_sizes; a finite set whole."""
    chosen = between(attncore_subject.form.block_sizes, USUAL_BLOCK_SIZES)
    _probe(attncore_subject, "block_size", chosen, small=True)


@covers("declared groups")
def test_largest_declared_group(attncore_subject: Subject) -> None:
    """As many query heads per key/value head as max_group_size says; 16 where it sets no limit."""
    group = min(attncore_subject.form.max_group_size or 16, 64)
    backend = attncore_subject.backend(num_heads=group, num_kv_heads=1)
    run_around_a_block(attncore_subject, backend)


def _probe(subject: Subject, field: str, chosen: list[int], *, small: bool = False) -> None:
    """Run a batch with each declared size.

    ``small``: one request a phase, over the edge of a block. One whose keys are more than a kernel reads at a time.
    """
    phases = subject.form.phases

    def run(backend: AttentionBackend) -> None:
        block = backend.config.block_size
        batch = [(block - 1, 2)] * ("prefill" in phases) + [(block, 1)] * ("decode" in phases)
        if not small and ("prefill" in phases or block <= MAX_FILLED):
            batch = subject.around_a_block(block)
        if "prefill" in phases:
            batch = subject.no_longer_than_declared([*batch, (BEYOND_A_TILE, 1 if "decode" in phases else 2)])
        run_batch(Engine(backend, num_blocks=_num_blocks(backend)), batch)

    _try_each(subject, field, chosen, run)


def _run_cross(backend: AttentionBackend) -> None:
    engine = CrossEngine(backend, num_blocks=_num_blocks(backend))
    engine.add("long", BEYOND_A_TILE)
    engine.cross_step({"long": 5})
    engine.add("short", 3)
    engine.cross_step({"long": 1, "short": 2})


def _num_blocks(backend: AttentionBackend) -> int:
    return NUM_BLOCKS + -(-(BEYOND_A_TILE + 2) // backend.config.block_size)


def _try_each(
    subject: Subject, field: str, chosen: list[int], run: Callable[[AttentionBackend], object], **asked: Any
) -> None:
    """Run with each declared size; one that a check of the plugin's own refuses is left out, and one whose blocks are
    too large for the longest request that the spec allows.
    """
    refused = []
    for size in chosen:
        try:
            run(subject.backend(**{field: size}, **asked))
        except UnsupportedError as error:
            refused.append(f"{field} {size}: {error}")
        except Exception as error:
            raise ConformanceError(f"the spec declares {field} {size}, but: {told(error)}") from error
    if len(refused) == len(chosen):
        raise UnsupportedError("; ".join(refused))
