"""Captured sizes of the persistent builder: padding, fixed addresses, and replays of a recorded graph."""

import random

import numpy as np
import pytest
from builder.persistent.capture_builders import MAX_LEN, MAX_REQS, new_builder, spec
from builder.plain_backend import BLOCK, Plain, config

from attncore import graphs
from attncore.builder import KVCacheGroup

FIELDS = (
    "slot_mapping", "positions", "token_to_req_indices", "seq_lens", "context_lens", "query_lens", "logits_indices",
    "query_start_loc", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len",
)  # fmt: skip


# ---- worked numbers --------------------------------------------------------------------------------------------------


def test_a_padded_step(kernels):
    """Lengths 5, 9 and 4 padded by one, as the list builder's worked numbers; starts plateau here."""
    batch, builder = new_builder(kernels)
    for name, (blocks, computed) in {"a": ([4, 6], 4), "b": ([9, 2, 7], 8), "c": ([5], 3)}.items():
        batch.add_request(name, blocks, computed)
    builder.capture(4)
    metadata = builder.build(bucket=4)
    assert metadata.slot_mapping.tolist() == [24, 28, 23, -1]
    assert metadata.seq_lens.tolist() == [5, 9, 4, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert metadata.seq_start_loc.tolist() == [0, 5, 14, 18, 18]
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 5, 6, 6]
    assert metadata.paged_kv_last_page_len.tolist() == [1, 1, 4, 0]
    assert metadata.paged_kv_indices.tolist() == [4, 6, 9, 2, 7, 5]
    assert (metadata.num_reqs, metadata.num_actual_reqs, metadata.num_decodes) == (4, 3, 3)
    assert (metadata.num_tokens, metadata.num_actual_tokens, metadata.num_decode_tokens) == (4, 3, 4)
    assert (metadata.use_cuda_graph, metadata.req_ids) == (True, ("a", "b", "c"))


def test_padding_of_the_length_that_the_backend_states(kernels):
    batch, builder = new_builder(kernels, backend=Plain(config(spec("always", pad_seq_len=1))))
    batch.add_request("a", [3], 1)
    builder.capture(3, 2)
    metadata = builder.build(bucket=3)  # one token where two are room: the backend captures any batch
    assert metadata.seq_lens.tolist() == [2, 1, 1]
    assert metadata.seq_start_loc.tolist() == [0, 2, 3, 4]
    assert metadata.slot_mapping.tolist() == [13, -1, -1, -1, -1, -1]
    assert metadata.token_to_req_indices.tolist() == [0, 2, 2, 2, 2, 2]
    assert (metadata.max_query_len, metadata.max_seq_len) == (2, 2)


def test_a_capture_is_of_the_longest(kernels):
    groups = [KVCacheGroup("full", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch, builder = new_builder(kernels, groups=groups, max_encoder_len=13, depth=1)
    batch.add_request("a", {"full": [1], "encoder": [2]}, encoder_seq_len=3)
    captured = builder.capture(2)
    assert (captured.max_seq_len, captured.groups["encoder"].max_seq_len) == (MAX_LEN, 13)
    assert (captured.req_ids, captured.num_actual_reqs) == ((), 0)
    warm = builder.build_empty(2)
    assert (warm.max_seq_len, warm.groups["encoder"].max_seq_len) == (0, 0)
    builder.build()  # the encoder's tokens
    metadata = builder.build(bucket=2)
    assert (metadata.max_seq_len, metadata.groups["encoder"].max_seq_len) == (2, 3)
    assert metadata.groups["encoder"].seq_lens.tolist() == [3, 0]
    assert builder.capture(2).groups["encoder"].max_seq_len == 13


def test_the_decodes_of_a_captured_step_are_the_step(kernels):
    """What a graph records from ``decode_metadata`` must lie where the next step's fields will."""
    batch, builder = new_builder(kernels)
    captured = builder.capture(2).decode_metadata.slot_mapping
    batch.add_request("a", [7], 2)
    for slot in (30, 31):
        metadata = builder.build(bucket=2)
        assert metadata.prefill_metadata is None
        assert metadata.decode_metadata.slot_mapping.ctypes.data == captured.ctypes.data
        assert captured.tolist() == [slot, -1]


def test_every_size_has_its_place(kernels):
    """A field's address depends on the size alone, whatever was built before."""
    batch, builder = new_builder(kernels, depth=3)
    builder.capture(2)
    alone = {name: getattr(builder.build_empty(2), name).ctypes.data for name in FIELDS}
    assert builder.capture(8).slot_mapping.shape == (8,)
    batch.add_request("a", [1, 2, 3, 4])
    builder.build({"a": 9})
    for _ in range(4):
        metadata = builder.build(bucket=2)
        assert {name: getattr(metadata, name).ctypes.data for name in FIELDS} == alone
    assert builder.captured == (2, 8)


def test_memory_of_captured_sizes(kernels):
    _, builder = new_builder(kernels, depth=3)
    eager = builder.nbytes
    builder.capture(8)
    assert builder.nbytes == eager // 3 * 4  # one more arena, on the device
    builder.capture(2)
    assert builder.nbytes == eager // 3 * 4  # which every size shares
    memories = (*builder._assembly.ring.memory, builder._assembly.ring._fixed)
    assert builder.nbytes == sum(memory.nbytes for memory in memories)


def test_the_live_table_stands_behind_padded_rows(kernels):
    """A row that pads may be a resting request's: its length keeps kernels out of it."""
    batch, builder = new_builder(kernels)
    batch.add_request("a", [1], 1)
    batch.add_request("resting", [9], 3)
    builder.capture(2)
    metadata = builder.build({"resting": 0}, bucket=2)
    assert metadata.seq_lens.tolist() == [2, 0]
    assert metadata.block_table[:, 0].tolist() == [1, 9]
    assert metadata.paged_kv_indices.tolist() == [1]
    assert metadata.block_table.ctypes.data == batch.block_table.ctypes.data


# ---- graphs ----------------------------------------------------------------------------------------------------------


def read(slot_mapping, seq_lens, block_table, query_start_loc, tokens, cache, out):
    """What a kernel does: writes the tokens where their slots say, then a number of every row's cache."""
    kept = slot_mapping >= 0
    cache[slot_mapping[kept]] = tokens[kept]
    for row, seq_len in enumerate(seq_lens):
        at = np.arange(seq_len)
        keys = cache[block_table[row, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK]
        queries = query_start_loc[row + 1] - query_start_loc[row]
        out[row] = np.dot(keys, at + 1) * (1 + queries)


def fields_of(metadata):
    return metadata.slot_mapping, metadata.seq_lens, metadata.block_table, metadata.query_start_loc


class Engine:
    """An engine that replays graphs where it can, beside a twin that never does."""

    SIZES = ((1, 1), (2, 2), (4, 1), (5, 2), (8, 1))  # requests, tokens of each

    def __init__(self, kernels, depth):
        self.batch, self.builder = new_builder(kernels, threshold=2, depth=depth)
        self.twin, self.eager = new_builder(kernels, threshold=2)
        self.cache = np.full(1000 * BLOCK, -(10**6), np.int64)
        self.cache_of_twin = self.cache.copy()
        self.graphs, self.replays = {}, dict.fromkeys(self.SIZES, 0)
        for size, query_len in reversed(self.SIZES):
            metadata = self.builder.capture(size, query_len)
            tokens, out = np.zeros(size * query_len, np.int64), np.zeros(size, np.int64)
            graph = graphs.new_graph("cpu")
            with graphs.capturing(graph):
                graphs.launch(read, *fields_of(metadata), tokens, self.cache, out)
            self.graphs[size] = graph, tokens, out

    def both(self, what, *args):
        for batch in (self.batch, self.twin):
            getattr(batch, what)(*args)

    def step(self, scheduled, size, random_tokens):
        expected = self.eager.build(scheduled)
        n, tokens = expected.num_reqs, random_tokens[: expected.num_tokens]
        out = np.zeros(n, np.int64)
        read(*fields_of(expected), tokens, self.cache_of_twin, out)
        if size is None:
            metadata, found = self.builder.build(scheduled), np.zeros(n, np.int64)
            read(*fields_of(metadata), tokens, self.cache, found)
        else:
            metadata = self.builder.build(scheduled, bucket=size)
            graph, inputs, found = self.graphs[size]
            inputs[:] = -7  # padded tokens are yesterday's, and must go nowhere
            inputs[: len(tokens)] = tokens
            found[:] = -7
            graph.replay()
            assert not found[n:].any()
        assert metadata.req_ids == expected.req_ids
        assert found[:n].tolist() == out.tolist()
        assert np.array_equal(self.cache, self.cache_of_twin)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_replays_are_what_eager_steps_are(kernels, depth):
    rng, engine = random.Random(depth), Engine(kernels, depth)
    numbers = np.random.default_rng(depth)
    fresh, names = iter(range(1, 1000)), iter(range(10**6))
    while min(engine.replays.values()) < (200 if kernels == "cython" else 40):
        batch = engine.batch
        if rng.random() < 0.01:
            fresh = iter(range(1, 1000))  # blocks are used again, with what was in them
            for name in batch.req_ids:
                engine.both("remove_request", name)
        for name in [name for name in batch.req_ids if batch.num_computed_tokens(name) > MAX_LEN - 9]:
            engine.both("remove_request", name)
        if len(batch) < MAX_REQS and rng.random() < 0.4:
            engine.both("add_request", next(names), [])
        if len(batch) and rng.random() < 0.05:
            name = rng.choice(batch.req_ids)
            engine.both("rollback", name, min(2, batch.num_computed_tokens(name)))
        size, each = rng.choice([*engine.SIZES, (None, rng.choice([1, 2, 7]))])
        wanted = rng.sample(batch.req_ids, min(len(batch), size or 2, rng.randint(0, MAX_REQS)))
        for name in wanted:
            held = len(batch.block_ids(name))
            more = -(-(batch.num_computed_tokens(name) + each) // BLOCK) - held
            try:
                engine.both("append_blocks", name, [next(fresh) for _ in range(more)])
            except RuntimeError:  # a generator that ended
                wanted = [other for other in wanted if other != name]
        needed = {name: -(-(batch.num_computed_tokens(name) + each) // BLOCK) for name in wanted}
        wanted = [name for name in wanted if len(batch.block_ids(name)) >= needed[name]]
        scheduled = dict.fromkeys(batch.req_ids, 0) | dict.fromkeys(wanted, each)
        engine.step(scheduled, size, numbers.integers(1, 1000, 24))
        if size is not None:
            engine.replays[size, each] += 1


def test_a_fault_in_padding_is_seen(monkeypatch):
    """The test above can fail: stale slots of padded tokens overwrite the cache."""
    engine = Engine("cython", 1)
    for name in "ab":
        engine.both("add_request", name, [{"a": 1, "b": 2}[name]])
    engine.step({}, 4, np.arange(1, 25))
    slots = engine.builder._assembly.ring.fixed_views(engine.builder._assembly.shapes.find(4).capacity).groups[0][
        "slot_mapping"
    ]
    build = engine.builder.build

    def faulty(*args, **options):
        metadata = build(*args, **options)
        slots[1] = 8
        return metadata

    monkeypatch.setattr(engine.builder, "build", faulty)
    with pytest.raises(AssertionError):
        engine.step({"b": 0}, 4, np.arange(1, 25))
