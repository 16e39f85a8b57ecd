"""Tickets over the transport ``copy``: an engine replays its graphs by itself, and leaves some builds unreplayed.

``test_device_gpu.py`` has those over ``graph``, where a replay without a build sees a step without rows.
"""

import random

import pytest

from attncore import graphs
from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import StandInGraph, capturing

SIZE = 4


class Engine:
    """A batch, a graph that copies what a step says, and what the steps are by a plain count of tokens."""

    def __init__(self, kernels):
        self.batch = InputBatch(max_num_reqs=SIZE, max_model_len=64, block_size=4, kernels=kernels)
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=64, transport="copy", ticket=True, depth=2)
        metadata = self.builder.capture(SIZE)
        self.graph, self.tokens, self.blocks, self.next_block = StandInGraph(), {}, {}, 1
        table = metadata.block_table
        with capturing(self.graph):
            metadata.record()
            self.seen = graphs.launch(lambda: (metadata.slot_mapping.clone(), metadata.seq_lens.clone(), table.clone()))

    def add(self, name, num_blocks):
        self.blocks[name] = list(range(self.next_block, self.next_block + num_blocks))
        self.next_block += num_blocks
        self.tokens[name] = 0
        self.batch.add_request(name, self.blocks[name])

    def remove(self, name):
        self.batch.remove_request(name)
        del self.tokens[name]

    def build(self):
        """Builds a step for the graph; what it holds of each request: (slot, length, table)."""
        metadata, rows = self.builder.build(bucket=SIZE), []
        for name in metadata.req_ids:
            position, blocks = self.tokens[name], self.blocks[name]
            rows.append((blocks[position // 4] * 4 + position % 4, position + 1, blocks))
            self.tokens[name] += 1
        return rows

    def replay(self):
        """Replays the graph by itself; what it saw of each row that has a slot."""
        self.graph.replay()
        slots, lengths, tables = (field.tolist() for field in self.seen)
        return [row for row in zip(slots, lengths, tables, strict=True) if row[0] >= 0]


@pytest.fixture
def engine(kernels):
    return Engine(kernels)


def held(rows, expected):
    """The rows, their tables cut to the blocks that the requests hold."""
    return [
        (slot, length, table[: len(blocks)]) for (slot, length, table), (*_, blocks) in zip(rows, expected, strict=True)
    ]


def test_builds_without_a_replay_lose_nothing(engine):
    """Their blocks and lengths reach the device with them, so the next replay sees its own step."""
    rng, dropped = random.Random(1), 0
    for step in range(200):
        if len(engine.tokens) < SIZE and rng.random() < 0.5:
            engine.add(step, 10)
        for name in [name for name, tokens in engine.tokens.items() if tokens == 40 or rng.random() < 0.05]:
            engine.remove(name)
        expected = engine.build()
        if rng.random() < 0.3:
            dropped += 1
            continue
        seen = engine.replay()
        assert held(seen, expected) == expected
    assert dropped > 30


def test_an_empty_step_is_what_a_replay_without_requests_needs(engine):
    engine.add("a", 10)
    expected = engine.build()
    assert held(engine.replay(), expected) == expected
    engine.builder.build_empty(SIZE)
    assert engine.replay() == []
    expected = engine.build()
    assert held(engine.replay(), expected) == expected
    assert expected[0][1] == 2
