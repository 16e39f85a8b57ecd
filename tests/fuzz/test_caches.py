"""kv_cache_views and write_cache over whole caches, pairs of any strides and bytes, right ones and others."""

from types import SimpleNamespace

import numpy as np
import torch
from fuzz.budget import examples
from fuzz.hostile import objects
from fuzz.outcomes import outcome
from hypothesis import given
from hypothesis import strategies as st

from attncore import AttentionBackend, AttentionImpl, BackendConfig

BLOCKS, TOKENS, HEADS, SIZE = 3, 4, 2, 8
SHAPE = BLOCKS, TOKENS, HEADS, SIZE
DTYPES = {"auto": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        raise NotImplementedError


class Stacked(AttentionBackend):
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        inner = (block_size, num_kv_heads) if self.config.kv_cache_layout == "NHD" else (num_kv_heads, block_size)
        return (2, num_blocks, *inner, head_size)


def backend_of(dtype, layout):
    return Stacked(BackendConfig(4, HEADS, SIZE, "float32", TOKENS, kv_cache_dtype=dtype, kv_cache_layout=layout))


BACKENDS = {(dtype, layout): backend_of(dtype, layout) for dtype in DTYPES for layout in ("NHD", "HND")}


def pair(memory, order, gaps, in_a_row):
    """Two views of ``memory`` whose axes lie in ``order``, with ``gaps`` of elements after each; keys and values in
    one row, or apart."""
    strides, step = [0, 0, 0, 1], (2 if in_a_row else 1) * SIZE + 16 * gaps[0]
    for axis, gap in zip(order, gaps[1:], strict=True):
        strides[axis], step = step, step * SHAPE[axis] + 16 * gap
    values = SIZE if in_a_row else step
    return tuple(torch.as_strided(memory, SHAPE, strides, start) for start in (16, 16 + values))


pairs = st.tuples(st.permutations([0, 1, 2]), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.booleans())
slot = st.integers(-2, BLOCKS * TOKENS - 1)


@st.composite
def caches(draw):
    """A backend, a cache that it takes, and the memory of the cache."""
    dtype, layout = draw(st.sampled_from(sorted(BACKENDS)))
    backend, kind = BACKENDS[dtype, layout], DTYPES[dtype]
    of_bytes = kind.itemsize == 1 and draw(st.booleans())
    memory = torch.zeros(8192, dtype=kind)
    if draw(st.booleans()):
        cache = pair(memory, *draw(pairs))
        cache = draw(st.sampled_from((tuple, list)))(part.view(torch.uint8) if of_bytes else part for part in cache)
    else:
        cache = memory[: 2 * BLOCKS * TOKENS * HEADS * SIZE].view(backend.kv_cache_shape(BLOCKS, TOKENS, HEADS, SIZE))
        cache = cache.view(torch.uint8) if of_bytes else cache
    return backend, cache, memory


@examples(150)
@given(made=caches(), slots=st.lists(slot, max_size=6, unique=True), seed=st.integers(0, 99))
def test_what_is_written_is_where_the_slots_say_and_nowhere_else(made, slots, seed):
    backend, cache, memory = made
    impl = backend.impl("layers.0", scale=1.0)
    fresh = torch.from_numpy(np.random.default_rng(seed).integers(-8, 8, (2, len(slots) + 1, HEADS, SIZE)) / 4).float()
    where = SimpleNamespace(slot_mapping=torch.tensor(slots, dtype=torch.int64))
    views = backend.kv_cache_views(cache)
    assert {view.untyped_storage().data_ptr() for view in views} == {memory.untyped_storage().data_ptr()}
    impl.write_cache(fresh[0], fresh[1], cache, where)
    count = 0
    for view, new in zip(views, fresh, strict=True):
        assert (tuple(view.shape), view.dtype) == (SHAPE, memory.dtype)
        for number in range(BLOCKS * TOKENS):
            held = view[number // TOKENS, number % TOKENS].float()
            wanted = new[slots.index(number)] if number in slots else torch.zeros(HEADS, SIZE)
            assert torch.equal(held, wanted), f"slot {number} of {slots}"
            count += int(wanted.count_nonzero())
    assert int(memory.float().count_nonzero()) == count, "memory beside the views was written to"


ODD = (
    torch.zeros(SHAPE).to_sparse(), torch.empty(SHAPE, device="meta"), torch.zeros(SHAPE[1:]).expand(SHAPE),
    torch.nn.Parameter(torch.zeros(SHAPE)), torch.zeros(SHAPE).bfloat16(), torch.zeros(SHAPE, dtype=torch.uint8),
    torch.zeros(SHAPE[0], SHAPE[1], SHAPE[3], SHAPE[2]).transpose(2, 3), np.zeros(SHAPE, np.float32),
)  # fmt: skip
"""Of the right shape, and something else is wrong."""


def wrong_caches():
    size = st.lists(st.integers(0, 9), max_size=6)
    kinds = st.sampled_from([*DTYPES.values(), torch.uint8, torch.int32, torch.float64])
    tensor = st.tuples(size, kinds).map(lambda drawn: torch.zeros(drawn[0], dtype=drawn[1]))
    tensor |= st.sampled_from((torch.zeros(SHAPE).to_sparse(), torch.empty(SHAPE, device="meta"), torch.tensor(1.0)))
    tensor |= pairs.map(lambda drawn: pair(torch.zeros(8192), *drawn)[0].transpose(2, 3))
    several = st.lists(tensor | st.sampled_from(ODD) | st.none(), max_size=3).map(tuple)
    several |= st.tuples(*[st.sampled_from((torch.zeros(SHAPE), *ODD))] * 2)
    return tensor | several | objects.map(lambda recipe: recipe())


def written(impl, *arguments):
    """write_cache, whose IndexError for a slot past the end (on a CPU) counts as any other refusal."""
    try:
        impl.write_cache(*arguments)
    except IndexError as error:
        raise ValueError(str(error)) from error


@examples(200)
@given(
    backend=st.sampled_from(sorted(BACKENDS)), cache=wrong_caches(), key=wrong_caches(), hostile_key=st.booleans(),
    slots=st.lists(slot | st.just(BLOCKS * TOKENS), max_size=4),
)  # fmt: skip
def test_a_cache_that_is_none_is_refused_by_its_name(backend, cache, key, hostile_key, slots):
    backend = BACKENDS[backend]
    views = outcome(backend.kv_cache_views, cache)
    if views[0] == "answer":
        assert all(tuple(view.shape[1:]) == SHAPE[1:] for view in views[1])
    where = SimpleNamespace(slot_mapping=torch.tensor(slots, dtype=torch.int64))
    fresh = torch.ones(len(slots), HEADS, SIZE)
    whole = backend.allocate_kv_cache(BLOCKS)
    impl = backend.impl("layers.0", scale=1.0)
    if hostile_key:
        cache = whole
    found = outcome(written, impl, key if hostile_key else fresh, fresh, cache, where)
    if found[0] != "answer":
        assert not whole.float().any(), f"refused ({found}), and written to"
