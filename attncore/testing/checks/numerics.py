"""Numbers against dense float32 attention: every backend passes these."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor

from attncore.builder import CommonAttentionMetadata, slice_by_requests, slice_metadata
from attncore.testing.engines.builder_engine import BuilderEngine
from attncore.testing.engines.compare import StepRequest, check_output
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.local_engine import LocalEngine
from attncore.testing.engines.reading_engine import by_every_method
from attncore.testing.engines.requests import History
from attncore.testing.engines.run_batches import run_around_a_block, run_batch, run_decodes_alone
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import MAX_SIZE, edges, own_scale
from attncore.testing.harness.draw_batches import batches, explore
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_prefix_shared_by_two_requests",
    "test_a_prefix_that_the_same_step_computes",
    "test_block_ids_at_the_end_of_the_pool",
    "test_block_ids_beyond_16_bits",
    "test_chunked_local_attention",
    "test_chunked_prefill",
    "test_decode",
    "test_grouped_heads",
    "test_layers_with_different_scales",
    "test_lengths_around_a_block",
    "test_many_requests_in_a_step",
    "test_mixed_batch",
    "test_output_is_written_where_it_is_asked",
    "test_parts_of_a_step",
    "test_prefill",
    "test_scale",
    "test_scores_whose_exponential_is_no_float32",
    "test_tokens_beyond_the_metadata",
]

BLOCKS_BEYOND_16_BITS = 2**15 + 64
MOST_BYTES = 2**28


def _explore(subject: Subject, examples: int, **kinds: bool) -> None:
    backend = subject.backend()

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        run_batch(Engine(backend, seed=seed), batch)

    explore(check, examples, batch=batches(backend.config.block_size, **kinds), seed=st.integers(0, 999))


@covers("prefill", basis=True)
def test_prefill(attncore_subject: Subject, attncore_examples: int) -> None:
    """Whole prompts in one step."""
    attncore_subject.require_phase("prefill")
    _explore(attncore_subject, attncore_examples, contexts=False)


@covers("chunked prefill")
def test_chunked_prefill(attncore_subject: Subject, attncore_examples: int) -> None:
    """Prompts of which an earlier step computed the beginning: queries are the last tokens of their sequence."""
    attncore_subject.require_phase("prefill")
    _explore(attncore_subject, attncore_examples, contexts=True, decode=False)


@covers("decode", basis=True)
def test_decode(attncore_subject: Subject, attncore_examples: int) -> None:
    """One token a request, over contexts of any length."""
    attncore_subject.require_phase("decode")
    _explore(attncore_subject, attncore_examples, contexts=True, decode=True)


@covers("mixed batches")
def test_mixed_batch(attncore_subject: Subject, attncore_examples: int) -> None:
    """Decodes beside prompts and chunks, in one call."""
    attncore_subject.require_phase("prefill", "decode")
    _explore(attncore_subject, attncore_examples)


@covers("mixed batches")
@pytest.mark.parametrize("parts", ["decodes and prefills", "slices"])
def test_parts_of_a_step(attncore_subject: Subject, parts: str) -> None:
    """Views of a step, planned and run one after another: its decodes and its prefills, and slices at requests."""
    attncore_subject.require_phase("prefill", "decode")
    engine = BuilderEngine(attncore_subject.backend(), depth=2)
    size = engine.block_size
    batch = [(0, size + 1), (3, 1), (size, 5), (2 * size - 1, 1), (size + 2, 1), (0, 2)]
    for name, (context, count) in enumerate(batch):
        engine.add(name, context + count)
    engine.fill({name: context for name, (context, _) in enumerate(batch)})
    engine.run_parts({name: count for name, (_, count) in enumerate(batch)}, _views if parts != "slices" else _slices)


def _views(step: CommonAttentionMetadata) -> list[Any]:
    return [step.prefill_metadata, step.decode_metadata]


def _slices(step: CommonAttentionMetadata) -> list[Any]:
    return [slice_metadata(step, one) for one in slice_by_requests(step.query_lens.tolist(), 3)]


@covers("mixed batches")
def test_chunked_local_attention(attncore_subject: Subject) -> None:
    """Steps of which ``local_attention_metadata`` makes a row for each chunk: a row's keys begin with those of its
    chunk, its tokens keep their positions in the request, and several rows are of one request."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    engine = LocalEngine(backend, chunk_size=2 * size)
    prompts = {"a": 4 * size + 1, "b": 2 * size, "c": 1, "d": 2 * size - 1}
    for name, tokens in prompts.items():
        engine.add(name, tokens + size + 5)
    engine.step(prompts)
    engine.step({"a": size + 3, "b": 1, "c": 3, "d": 2})
    engine.step(dict.fromkeys(prompts, 1))


@covers("lengths around a block")
@pytest.mark.parametrize("tokens", [-1, 0, 1])
def test_lengths_around_a_block(attncore_subject: Subject, tokens: int) -> None:
    """A request of one token, one that fills a block exactly, one token less, one more; in prefill and in decode."""
    backend = attncore_subject.backend()
    size = backend.config.block_size
    lengths = {1, max(1, size + tokens), max(1, 2 * size + tokens)}
    if "prefill" in attncore_subject.form.phases:
        run_batch(Engine(backend), [(0, length) for length in lengths])
    if "decode" in attncore_subject.form.phases:
        run_batch(Engine(backend), [(length - 1, 1) for length in lengths if length > 1] or [(1, 1)])


@covers("many requests")
def test_many_requests_in_a_step(attncore_subject: Subject) -> None:
    """More requests than 256, of many lengths, in one step: their contexts, decodes, then decodes beside chunks."""
    backend = attncore_subject.backend()
    size = backend.config.block_size
    contexts = {name: 1 + 7 * name % min(size + 1, 40) for name in range(260)}
    blocks = {name: -(-(context + 4) // size) for name, context in contexts.items()}
    engine = Engine(backend, num_blocks=sum(blocks.values()) + 1)  # and the null block
    for name, context in contexts.items():
        engine.add(name, context + 4)
    engine.fill(contexts)
    if "decode" in engine.phases:
        engine.step(dict.fromkeys(contexts, 1))
    if "prefill" in engine.phases:
        decode = 1 if "decode" in engine.phases else 2
        engine.step({name: 3 if name % 4 == 0 else decode for name in contexts})


@covers("prefix hits")
def test_a_prefix_shared_by_two_requests(attncore_subject: Subject, attncore_examples: int) -> None:
    """A request starts on blocks that another computed, and both go on, reading the same blocks."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    size = backend.config.block_size

    def check(blocks: int, tail: int, own: int, seed: int) -> None:
        engine = Engine(backend, seed=seed)
        engine.add("first", blocks * size + tail + 1)
        engine.step({"first": blocks * size + tail})
        engine.add("second", blocks * size + own + 1, prefix_of="first", prefix_blocks=blocks)
        engine.step({"first": 1, "second": own})
        engine.remove("first")
        engine.step({"second": 1})

    length = st.sampled_from([1, 2, size, size + 1])
    explore(check, attncore_examples, blocks=st.integers(1, 3), tail=length, own=length, seed=st.integers(0, 999))


class _SharingEngine(Engine):
    """Requests of ``sharing`` begin on whole blocks of another one, which the same step fills."""

    sharing: Mapping[Hashable, Hashable] = {}

    def expected(
        self, tensors: tuple[Tensor, Tensor, Tensor], requests: Iterable[StepRequest]
    ) -> list[tuple[Tensor, Tensor]]:
        requests, start, fresh = list(requests), 0, {}
        for one in requests:
            tokens = slice(start, start + one.tokens)
            start += one.tokens
            fresh[one.name] = History(tensors[1][tokens], tensors[2][tokens])
        for name, first in self.sharing.items():
            self.history[name] = fresh[first].first(self.context(name))
        return super().expected(tensors, requests)


@covers("prefix hits")
def test_a_prefix_that_the_same_step_computes(attncore_subject: Subject) -> None:
    """Requests begin on blocks that another one fills in the same step, as where a prompt comes twice at once: a step's
    keys are written before any is read. The request that decodes stands before the one that it reads."""
    attncore_subject.require_phase("prefill", "decode")
    engine = _SharingEngine(attncore_subject.backend())
    computed = 2 * engine.block_size
    engine.add("first", computed + 1)
    for name, tokens in (("decode", 1), ("chunk", 3)):
        engine.add(name, computed + tokens, prefix_of="first", prefix_blocks=2)
        engine.history[name] = History(*(engine.drawn.draw(computed, part) for part in ("key", "value")))
    engine.sharing = {"decode": "first", "chunk": "first"}
    engine.step({"first": computed + 1, "decode": 1, "chunk": 3})


@covers("block ids at the end of the pool")
def test_block_ids_at_the_end_of_the_pool(attncore_subject: Subject) -> None:
    """The last block of the cache is a block like any other."""
    backend = attncore_subject.backend()
    size = backend.config.block_size
    engine = Engine(backend)
    engine.free.sort()
    engine.add("a", max(2 * size, size + 2))  # blocks are taken from the end
    if engine.num_blocks - 1 not in engine.batch.block_ids("a"):
        raise ConformanceError("the request does not hold the last block, so nothing is tested")
    engine.fill({"a": size + 1})
    engine.step({"a": 1 if "decode" in engine.phases else max(size - 1, 1)})


@covers("block ids at the end of the pool")
def test_block_ids_beyond_16_bits(attncore_subject: Subject) -> None:
    """A block id is an int32: a kernel that keeps it in 16 bits reads another block of a large pool."""
    form = attncore_subject.form
    if form.max_block_id is not None and form.max_block_id < BLOCKS_BEYOND_16_BITS:
        raise UnsupportedError(f"its spec says max_block_id={form.max_block_id}")
    smallest = {name: edges(getattr(form, f"{name}s"), MAX_SIZE)[:1] for name in ("head_size", "block_size")}
    heads = {"num_heads": 1, "num_kv_heads": 1}
    backend = attncore_subject.backend(**heads, **{name: size[0] for name, size in smallest.items() if size})
    config = backend.config
    shape = backend.kv_cache_shape(BLOCKS_BEYOND_16_BITS, config.block_size, config.num_kv_heads, config.head_size)
    size = math.prod(shape) * backend.kv_cache_torch_dtype().itemsize
    if size > MOST_BYTES:
        raise UnsupportedError(
            f"a cache of {BLOCKS_BEYOND_16_BITS} of its smallest blocks takes {size >> 20} MiB; the kit takes no more "
            f"than {MOST_BYTES >> 20}"
        )
    engine = Engine(backend, num_blocks=BLOCKS_BEYOND_16_BITS)
    engine.free.sort()  # blocks are taken from the end
    engine.add("a", engine.block_size + 3)
    engine.fill({"a": engine.block_size + 1})
    engine.step({"a": 1 if "decode" in engine.phases else 2})


@covers("grouped heads")
@pytest.mark.parametrize(
    "heads",
    [(1, 1), (2, 2), (4, 2), (4, 1), (8, 1), (6, 2), (14, 2), (40, 8), (64, 8)],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def test_grouped_heads(attncore_subject: Subject, heads: tuple[int, int]) -> None:
    """Query head h reads key/value head ``h // (num_heads // num_kv_heads)``."""
    backend = attncore_subject.backend(num_heads=heads[0], num_kv_heads=heads[1])
    run_around_a_block(attncore_subject, backend)


@covers("prefill")
def test_scale(attncore_subject: Subject) -> None:
    """The scale is the layer's, not one over the root of the head size."""
    backend = attncore_subject.backend()
    run_around_a_block(attncore_subject, backend, scale=own_scale(backend))


@covers("prefill")
@pytest.mark.parametrize("score", [200, -200], ids=["large", "small"])
def test_scores_whose_exponential_is_no_float32(attncore_subject: Subject, score: int) -> None:
    """Every key has the same score: the mean of the values, where no sum of exponentials is too large, or is 0. Under a
    cap that it is far beyond, too, and beside sinks that are larger and smaller, where these are declared."""
    backend = attncore_subject.backend()
    sinks = tuple(300.0 if head % 2 else -300.0 for head in range(backend.config.num_heads))
    samples: list[dict[str, Any]] = [{}, {"logits_soft_cap": 2.0}, {"sinks": sinks}]
    for features in samples:
        if not set(features) <= set(attncore_subject.form.features):
            continue
        scale = math.ceil(64 * abs(score) / backend.config.head_size) / 64  # exact, and so are sums of scaled queries
        engine = Engine(backend, scale=scale, **features)
        engine.drawn.every_key = math.copysign(1.0, score)
        run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))
        run_decodes_alone(engine)


@covers("prefill")
def test_layers_with_different_scales(attncore_subject: Subject) -> None:
    """Two layers of one backend keep their own scale (and plan) in the same step."""
    backend = attncore_subject.backend()
    first = Engine(backend)
    second = Engine(backend, scale=own_scale(backend, 1))
    backend.impl("layers.0", scale=first.features["scale"])
    first.siblings, second.siblings = [("the other layer", second.features)], [("the other layer", first.features)]
    for engine in (second, first):
        run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))


@covers("output")
def test_output_is_written_where_it_is_asked(attncore_subject: Subject) -> None:
    """``output`` given: it is filled and returned."""
    import torch

    backend = attncore_subject.backend()
    engine = Engine(backend)
    forward = engine.impl.forward

    def into(
        query: Tensor, key: Tensor, value: Tensor | None, kv_cache: Any, metadata: CommonAttentionMetadata
    ) -> Tensor:
        size = (*query.shape[:2], backend.config.head_size_v or backend.config.head_size)
        output = torch.full(size, float("nan"), dtype=query.dtype, device=query.device)
        check_output(forward(query, key, value, kv_cache, metadata, output), output)
        return output

    engine.impl.forward = into  # type: ignore[method-assign, assignment]
    run_batch(engine, attncore_subject.around_a_block(backend.config.block_size))


@covers("output")
def test_tokens_beyond_the_metadata(attncore_subject: Subject) -> None:
    """Tensors may have more tokens than the metadata, in every method: an engine pads them to a size of its own, with
    anything. In steps of prompts, of chunks and of decodes."""
    for engine in by_every_method(attncore_subject):
        for name, length in (("a", 6), ("b", 2), ("c", 9)):
            engine.add(name, length)
        if "prefill" in engine.phases:
            engine.step({"a": 5, "b": 1}, extra=3)  # prompts alone, whose keys are all the step's own
            engine.step({"c": 4}, extra=1)
            engine.step({"c": 5}, extra=2)
        else:
            engine.fill({"a": 5, "b": 1})
        if "decode" in engine.phases:
            engine.step({"a": 1, "b": 1}, extra=3)
