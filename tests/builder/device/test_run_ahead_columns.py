"""Token columns and steps ahead: the column has the first token, the device the ones behind it."""

import random

import pytest
import torch

from attncore import InputBatch, MetadataBuilder

BLOCK, LEN = 4, 80


def sampled_from(token, position):
    return (token * 7 + position) % 1000


class Samples:
    """In place of a captured graph: takes ids, or what the device sampled where these are below 0, and samples."""

    def __init__(self, metadata, last, count):
        self.metadata, self.last, self.count = metadata, last, count

    def replay(self):
        step = self.metadata
        for index in range(self.count):
            if index:
                step.record_next()
            else:
                step.record()
            step.forget_step()
            taken = torch.where(step.ids < 0, self.last[step.place], step.ids)
            sampled = sampled_from(taken, step.positions)
            self.last[step.place] = sampled
            step.ids[:] = sampled


class Engine:
    """Requests whose tokens are known beside the engine: ``said`` has all of them, those not read yet included."""

    def __init__(self, kernels, unknown=-1):
        self.batch = InputBatch(max_num_reqs=4, max_model_len=LEN, block_size=BLOCK, kernels=kernels)
        self.ids = self.batch.token_column("ids", unknown=unknown)
        self.place = self.batch.column("place", "int64")
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=64, transport="copy")
        self.builder.register_column(self.ids)
        self.builder.register_column(self.place)
        self.last, self.said, self.names = torch.zeros(5, dtype=torch.int64), {}, 0
        self.graphs = {count: Samples(self.builder.capture(4), self.last, count) for count in (1, 2)}

    def add(self, prompt, computed=0):
        name = f"request {self.names}"
        count = LEN // BLOCK
        self.batch.add_request(name, [1 + self.names * count + i for i in range(count)], computed)
        self.names, self.said[name] = self.names + 1, list(prompt)
        self.ids.give(name, prompt)
        self.place[name] = min({1, 2, 3, 4} - {self.place[other] for other in self.batch.req_ids})
        return name

    def remove(self, name):
        self.batch.remove_request(name)
        del self.said[name]

    def speak(self, req_ids, count):
        for name in req_ids:
            said = self.said[name]
            for _ in range(count):
                said.append(sampled_from(said[-1], len(said) - 1))

    def ends(self, names):
        return [self.said[name][-1] for name in names]

    def check(self, names):
        assert self.last[[self.place[name] for name in names]].tolist() == self.ends(names)


@pytest.mark.parametrize("seed", range(3))
def test_steps_ahead_take_the_columns_token_and_then_the_devices(kernels, seed):
    """Whether the engine writes what was sampled, or leaves it to the device, in steps ahead and single ones."""
    draw, engine = random.Random(seed), Engine(kernels)
    batch, builder, ids = engine.batch, engine.builder, engine.ids
    for _ in range(60):
        for name in list(engine.said):
            if draw.random() < 0.1 or batch.num_computed_tokens(name) > LEN - 8:
                engine.remove(name)
        while len(batch) < 4 and draw.random() < 0.6:
            prompt = [draw.randrange(1000) for _ in range(draw.randrange(1, 9))]
            engine.add(prompt, len(prompt) - 1)
        count = draw.randrange(1, 7)
        resting = {name: 0 for name in batch.req_ids if draw.random() < 0.1}
        steps = builder.run_ahead(count, bucket=4, scheduled=resting)
        until = count if draw.random() < 0.6 else draw.randrange(1, count + 1)
        while steps.launched < until:
            each = draw.choice((1, 2)) if until - steps.launched > 1 else 1
            steps.replay(engine.graphs[each], each)
        assert steps.stop() == until
        engine.speak(steps.first.req_ids, until)
        engine.check(steps.first.req_ids)
        if draw.random() < 0.5:
            ids.write(steps.first, engine.ends(steps.first.req_ids))
            for name in steps.first.req_ids:
                engine.last[engine.place[name]] = 500  # what the host has written is taken
        else:
            ids.leave(steps.first)
            assert all(ids[name] == -1 for name in steps.first.req_ids)


def test_a_prompts_last_token_is_given_and_the_next_one_unknown(kernels):
    engine = Engine(kernels)
    name = engine.add([5, 6, 7])
    assert engine.builder.build({name: 3}).ids.tolist() == [5, 6, 7]
    assert (engine.ids[name], engine.builder.build().ids.tolist()) == (-1, [-1])
    engine.ids[name] = 9
    metadata = engine.builder.build()
    engine.remove(name)
    engine.ids.leave(metadata)  # of a request that has left
    name = engine.add([5])
    engine.batch.rollback(name, 0)
    assert metadata.ids.tolist() == [9]
    assert engine.builder.build().ids.tolist() == [5]
    assert engine.builder.build().ids.tolist() == [-1]


def test_tokens_that_were_given_behind_the_first_are_refused(kernels):
    engine = Engine(kernels)
    first, second = engine.add([1, 2, 3], 2), engine.add([1, 2, 3], 1)
    builder = engine.builder
    with pytest.raises(ValueError, match=r"^ids: row 1 \(request 'request 1'\) was given tokens behind .* position 1,"):
        builder.run_ahead(2, bucket=4)
    assert (builder.steps_ahead, engine.batch.num_computed_tokens(first)) == (None, 2)
    steps = builder.run_ahead(2, bucket=4, scheduled={second: 0})
    steps.replay(engine.graphs[2], 2)
    builder.run_ahead(1, bucket=4, scheduled={first: 0}).stop()


@pytest.mark.parametrize(("dtype", "unknown"), [("uint8", -1), ("int8", 300), ("bool", 2)])
def test_an_unknown_that_does_not_fit_is_refused(kernels, dtype, unknown):
    batch = InputBatch(max_num_reqs=1, max_model_len=8, block_size=BLOCK, kernels=kernels)
    with pytest.raises(ValueError, match=f"^unknown: {unknown} does not fit {dtype}"):
        batch.token_column("ids", dtype, unknown=unknown)
    with pytest.raises(TypeError, match=r"^unknown: .x."):
        batch.token_column("ids", dtype, unknown="x")
    batch.token_column("ids", "int32", unknown=-1)
