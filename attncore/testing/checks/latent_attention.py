"""Latent caches (MLA), and values of a size of their own, where the spec declares them."""

from __future__ import annotations

import math

import pytest
import torch

from attncore.abstract import AttentionBackend
from attncore.show import counted
from attncore.testing.checks.captured_prompts import SIZES, replay_prompts
from attncore.testing.checks.captured_sizes import require_any_lengths
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_chunks_engine import CapturedLongChunksEngine
from attncore.testing.engines.captured_long_engine import SHORTER, CapturedLongEngine
from attncore.testing.engines.captured_prompts_engine import CapturedPromptsEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.every_method_engine import EveryMethodAdoptingEngine, EveryMethodEngine
from attncore.testing.engines.held_numbers import check_held_numbers
from attncore.testing.engines.moved_caches import check_copied_blocks, check_moved_slots, check_swapped_blocks
from attncore.testing.engines.random_tensors import FP8
from attncore.testing.engines.run_batches import (
    run_around_a_block,
    run_batch,
    run_decodes_alone,
    run_drawn_batches,
    run_with_a_copied_block,
)
from attncore.testing.engines.run_long_contexts import run_long_contexts
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import features_of, require_declared
from attncore.testing.harness.declared_samples import (
    FEATURES,
    LONG_FEATURES,
    TOGETHER,
    edges,
    in_one_layer,
    of_a_feature,
    own_scale,
)
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES

__all__ = [
    "test_latent_attention_in_a_dtype",
    "test_latent_attention_over_long_contexts",
    "test_latent_attention_over_random_batches",
    "test_latent_attention_reads_only_its_own",
    "test_latent_attention_with_a_feature",
    "test_latent_blocks_are_copied",
    "test_latent_caches_in_fp8",
    "test_latent_captured_prompts",
    "test_latent_captured_sizes_over_changing_batches",
    "test_latent_captured_sizes_over_changing_lengths",
    "test_latent_log_sum_exp",
    "test_latent_padding_changes_no_block",
    "test_latent_slots_are_moved",
    "test_sizes_of_a_value_head",
    "test_the_latent_cache_holds_a_row_a_token",
]
MOST = 256  # of a value head's sizes
CONTEXTS = {"long": 2049, "longer": 4001, "short": 3}
DRAFTS = 2
MANY_HEADS = 32  # kernels of latent attention read 16 or 64 heads at a time


def _latent(subject: Subject) -> AttentionBackend:
    return subject.latent.backend(use_mla=True)


def _beside(subject: Subject) -> Subject:
    """The subject with latent caches, for what other rows try with plain ones; UnsupportedError where theirs are
    latent."""
    if subject.latent is subject:
        raise UnsupportedError("its other rows run with latent caches")
    return subject.latent


def _captured(subject: Subject, tokens: int) -> Subject:
    """The same, where it captures decodes of so many tokens."""
    latent = _beside(subject)
    latent.require_graphs("prefill", "decode")
    if tokens > 1:
        latent.require("multi_token_decode")
        if latent.form.cuda_graph == "uniform_decode":
            raise UnsupportedError("its spec declares graphs of decodes of one token only")
    return latent


@covers("latent attention")
def test_latent_attention_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Mixed batches: every query head reads the one latent row of a token, values are its first columns. The scale is
    the layer's: models have that of the heads which the rows stand for, not one over the root of the rows' size."""
    backend = _latent(attncore_subject)
    scale = own_scale(backend)
    run_drawn_batches(attncore_subject.latent, backend, attncore_examples, scale=scale)


@covers("latent attention")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_latent_attention_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Each feature that is declared, and all of them, by every method."""
    subject = _beside(attncore_subject)
    backend = subject.backend(use_mla=True)
    features = of_a_feature(feature, features_of(backend))
    run_around_a_block(subject, backend, make=EveryMethodEngine, **features)


@covers("latent attention")
def test_latent_attention_reads_only_its_own(attncore_subject: Subject) -> None:
    """NaN in all that no token owns (unused rows of last pages too, unless the spec declares ``finite_tail``)."""
    backend = _latent(attncore_subject)
    run_around_a_block(attncore_subject.latent, backend, junk=math.nan)


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
    """Within every cache, once in one that several layers have, and to another; a request whose block was copied and
    replaced goes on with the copy."""
    attncore_subject.latent.require_phase("decode")
    run_with_a_copied_block(_latent(attncore_subject))
    check_copied_blocks(_latent(attncore_subject))
    check_swapped_blocks(_latent(attncore_subject))


@covers("latent attention")
def test_latent_slots_are_moved(attncore_subject: Subject) -> None:
    """By ``move_slots``, as in other caches."""
    check_moved_slots(_beside(attncore_subject).backend(use_mla=True))


@covers("latent attention")
def test_latent_attention_over_long_contexts(attncore_subject: Subject) -> None:
    """Decodes after 2,049 and 4,001 tokens beside one after 3, one alone, several tokens of each, a chunk."""
    subject = _beside(attncore_subject)
    subject.require_phase("prefill", "decode")
    backend = subject.backend(use_mla=True, num_heads=2)
    blocks = sum(-(-(context + 24) // backend.config.block_size) for context in CONTEXTS.values())
    drafts = DRAFTS if "multi_token_decode" in subject.form.features else 0
    engine = Engine(backend, num_blocks=blocks + 8, decode_threshold=1 + drafts)
    for name, context in CONTEXTS.items():
        engine.add(name, context + 24)
        engine.fill({name: context})
    engine.step(dict.fromkeys(CONTEXTS, 1))
    engine.step({"longer": 1})
    engine.step(dict.fromkeys(CONTEXTS, 1 + DRAFTS))
    engine.step({"longer": 17, "long": 1})


@covers("latent attention")
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_in_a_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Every method, in each dtype: of 32 heads where they are declared, over long contexts, and in captured steps."""
    subject = attncore_subject.latent
    require_declared(dtype, subject.form.dtypes)
    heads = min(MANY_HEADS, subject.form.max_group_size or MANY_HEADS)
    many = subject.backend(use_mla=True, dtype=dtype, num_heads=heads)
    for make in (EveryMethodEngine, EveryMethodAdoptingEngine):
        run_around_a_block(subject, many, make=make)
    if len(subject.form.phases) == 1:
        return
    backend = subject.backend(use_mla=True, dtype=dtype)
    run_long_contexts(backend)
    if subject.form.cuda_graph != "never" and dtype != subject.request().dtype:
        CapturedLongEngine(backend, 1, contexts=SHORTER).run()


@covers("latent attention")
@pytest.mark.parametrize("tokens", [1, 5])
def test_latent_padding_changes_no_block(attncore_subject: Subject, tokens: int) -> None:
    """Requests own the whole pool, every slot but one holds a token, and padding has the slot -1: that one changes."""
    subject = _beside(attncore_subject)
    subject.require_phase("prefill", "decode")
    engine = Engine(subject.backend(use_mla=True), num_blocks=4)
    size = engine.block_size
    engine.free.sort()
    engine.add("a", 2 * size)
    engine.add("b", size)
    engine.fill({"a": 2 * size, "b": size - 1})
    engine.step({"b": 1}, pad_tokens=tokens)


@covers("latent attention")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_latent_captured_sizes_over_changing_batches(
    attncore_subject: Subject, attncore_captured_steps: int, tokens: int
) -> None:
    """Decodes of one token, and of drafts beside it, padded to captured sizes; junk in what padding has for keys."""
    engine = CapturedEngine(_captured(attncore_subject, tokens).backend(use_mla=True), tokens)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


@covers("latent attention")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_latent_captured_sizes_over_changing_lengths(attncore_subject: Subject, tokens: int) -> None:
    """Rows that grow and shrink between 2 and 3,000 tokens from replay to replay: an older plan is wrong."""
    CapturedLongEngine(_captured(attncore_subject, tokens).backend(use_mla=True, num_heads=2), tokens).run()


@covers("latent attention")
def test_latent_captured_prompts(attncore_subject: Subject) -> None:
    """Prompts, chunks of them and decodes in graphs of a number of tokens, and over long contexts with all features
    that are declared: for specs that say ``always``."""
    subject = _captured(attncore_subject, 1)
    require_any_lengths(subject)
    backend = subject.backend(use_mla=True)
    replay_prompts(CapturedPromptsEngine(backend, sizes=SIZES))
    CapturedLongChunksEngine(backend, **in_one_layer(features_of(backend), LONG_FEATURES)).run()


@covers("latent attention")
def test_latent_log_sum_exp(attncore_subject: Subject, attncore_examples: int) -> None:
    """Natural logarithms, float32, of every token of mixed batches."""
    subject = _beside(attncore_subject)
    subject.require("lse")
    run_drawn_batches(subject, subject.backend(use_mla=True), attncore_examples, with_lse=True)


@covers("latent attention")
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_latent_caches_in_fp8(attncore_subject: Subject, kind: str) -> None:
    """k_scale is the scale of the values, too: as a number, and as a tensor on the device."""
    subject = attncore_subject.latent
    subject.require("kv_scales" if kind == "number" else "kv_scales_on_device")
    declared = [dtype for dtype in FP8 if dtype in subject.form.kv_cache_dtypes]
    if not declared:
        raise UnsupportedError("its spec declares no fp8 cache")
    for dtype in declared:
        backend = subject.backend(use_mla=True, kv_cache_dtype=dtype)
        scale = 4.0 if kind == "number" else torch.tensor([4.0])
        given = {"k_scale": scale, "v_scale": scale, "scale": backend.config.head_size**-0.5 / 4}
        for make in (Engine, EveryMethodEngine, EveryMethodAdoptingEngine):
            engine = make(backend, **given)
            run_batch(engine, subject.around_a_block(backend.config.block_size))
            run_decodes_alone(engine)
            check_held_numbers(engine)


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
            run_around_a_block(attncore_subject, attncore_subject.backend(head_size_v=size))
            tried += 1
        except UnsupportedError as error:
            refused.append(f"head_size_v {size}: {error}")
        except Exception as error:
            raise ConformanceError(f"the spec declares head_size_v {size}, but: {told(error)}") from error
    if not tried:
        raise UnsupportedError("; ".join(refused) or "its spec declares no size but the query's")
