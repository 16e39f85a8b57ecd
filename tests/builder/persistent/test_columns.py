"""Columns: an engine's numbers by request, which each step has by row and by token."""

import random

import numpy as np
import pytest
import torch
from interrupted_calls import AtOpcode

from attncore import InputBatch, MetadataBuilder
from attncore.errors import CaptureError

BLOCK = 4


class Engine:
    """A batch with two columns of floats and tokens; what each request has is known beside it."""

    def __init__(self, kernels, *, width=1, functions=False):
        self.batch = InputBatch(max_num_reqs=9, max_model_len=200, block_size=BLOCK, kernels=kernels)
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=128, decode_threshold=3)
        self.ids, self.heat = (
            self.batch.token_column("ids", np.int32, width=width),
            self.batch.column("heat", np.float64),
        )
        self.builder.register_column(self.ids)
        self.builder.register_column(self.heat)
        self.tokens, self.heats, self.next = {}, {}, 1
        if functions:
            self.builder.register_field(
                "twice", np.int32, "request", lambda step, out: np.multiply(step.host.seq_lens, 2, out)
            )

    def add(self, name, tokens, computed=0):
        count = -(-(len(tokens) + 40) // BLOCK)
        self.batch.add_request(name, list(range(self.next, self.next + count)), computed)
        self.next += count
        self.tokens[name], self.heats[name] = list(tokens), len(tokens) + 0.25
        self.ids.give(name, tokens)
        self.heat[name] = self.heats[name]

    def remove(self, name):
        self.batch.remove_request(name)
        del self.tokens[name], self.heats[name]

    def check(self, metadata):
        starts = metadata.host.query_start_loc.tolist()
        for row, name in enumerate(metadata.req_ids):
            first, length = int(metadata.host.context_lens[row]), int(metadata.host.query_lens[row])
            assert metadata.ids[starts[row] : starts[row + 1]].tolist() == self.tokens[name][first : first + length]
            assert metadata.heat[row] == self.heats[name]
        rows, tokens = metadata.num_actual_reqs, metadata.num_actual_tokens
        assert not metadata.heat[rows:].any()
        assert not metadata.ids[tokens:].any()


@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_step_has_the_tokens_and_numbers_of_its_requests(kernels, seed, functions):
    draw, engine = random.Random(seed), Engine(kernels, functions=functions)
    engine.builder.capture(4)
    for number in range(150):
        for name in list(engine.tokens):
            if draw.random() < 0.06 or engine.batch.num_computed_tokens(name) > 30:
                engine.remove(name)
        while len(engine.tokens) < 8 and draw.random() < 0.5:
            engine.add(
                f"request {number}, {len(engine.tokens)}", [draw.randrange(1000) for _ in range(draw.randrange(1, 9))]
            )
        scheduled = {}
        for name, tokens in engine.tokens.items():
            left = len(tokens) - engine.batch.num_computed_tokens(name)
            scheduled[name] = draw.choice((0, 1, left, left))
        running = [count for count in scheduled.values() if count]
        bucket = 4 if len(running) <= 4 and {*running} <= {1} else None
        if draw.random() < 0.1 and len(engine.batch) > 1:
            engine.batch.swap_rows(0, 1)
        metadata = engine.builder.build(scheduled, bucket=bucket)
        engine.check(metadata)
        sampled = [draw.randrange(1000) for _ in range(metadata.num_reqs)]
        if draw.random() < 0.2 and metadata.req_ids:  # what has left since is passed over
            engine.remove(draw.choice(metadata.req_ids))
        engine.ids.write(metadata, draw.choice((list, np.array))(sampled) if draw.random() < 0.9 else tuple(sampled))
        for name, token in zip(metadata.req_ids, sampled, strict=False):
            if name in engine.tokens and len(engine.tokens[name]) == engine.batch.num_computed_tokens(name):
                engine.tokens[name].append(token)


def test_a_decode_of_everybody_has_its_columns(kernels):
    engine = Engine(kernels)
    for name in "abc":
        engine.add(name, [1, 2, 3], 3)
        engine.tokens[name].append(0)  # nothing was written yet
    engine.check(engine.builder.build())
    metadata = engine.builder.last_metadata
    engine.ids.write(metadata, [7, 8, 9, 10])
    for name, token in zip("abc", (7, 8, 9), strict=True):
        engine.tokens[name].append(token)
    engine.check(engine.builder.build())


def test_drafts_stand_behind_the_sampled_token(kernels):
    engine = Engine(kernels, width=3)
    engine.add("a", [5, 6], 1)
    engine.add("b", [5, 6, 7, 8], 4)
    engine.ids["a"], engine.ids["b"] = [10, 11, 12], [20, 21, 22]
    metadata = engine.builder.build(query_len=3)
    assert metadata.ids.tolist() == [6, 10, 11, 20, 21, 22]
    assert engine.ids["b"].tolist() == [20, 21, 22]


def test_tokens_that_a_column_has_not_are_refused_and_nothing_changes(kernels):
    engine = Engine(kernels)
    engine.add("a", [5, 6])
    with pytest.raises(ValueError, match=r"^ids: row 0 \(request 'a'\) runs tokens 0 to 3, more than it was given"):
        engine.builder.build({"a": 4})
    assert (engine.builder.last_step, engine.batch.num_computed_tokens("a")) == (-1, 0)
    assert engine.builder.build({"a": 3}).ids.tolist() == [5, 6, 0]


def test_a_request_that_is_added_has_nothing_of_one_before(kernels):
    engine = Engine(kernels)
    engine.add("a", [5, 6])
    engine.ids["a"] = 9
    engine.remove("a")
    engine.batch.add_request("b", [90, 91], 1)
    metadata = engine.builder.build()
    assert (engine.heat["b"], metadata.heat.tolist(), metadata.ids.tolist()) == (0.0, [0.0], [0])


def test_what_a_column_made_later_has_of_requests_that_are_there_is_unknown(kernels):
    """Were it 0, a graph would take that for a token that the host knows."""
    batch = InputBatch(max_num_reqs=3, max_model_len=32, block_size=4, kernels=kernels)
    batch.add_request("before", [1, 2], 3)
    ids = batch.token_column("input_ids", width=2, unknown=-1)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, decode_threshold=2)
    builder.register_column(ids)
    batch.add_request("behind", [3, 4], 3)
    assert ids["before"].tolist() == ids["behind"].tolist() == [-1, -1]
    assert builder.build(query_len=2).input_ids.tolist() == [-1] * 4


def test_a_removal_that_is_interrupted_leaves_the_values(kernels):
    engine = Engine(kernels)
    engine.add("a", [5, 6], 2)
    engine.ids["a"] = 9

    def removes_and_fails():
        with engine.batch._core.enter():
            engine.batch._core.remove("a")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        removes_and_fails()
    assert (engine.builder.build().ids.tolist(), engine.heat["a"]) == ([9], 2.25)


def test_what_is_no_column_or_no_value_is_refused(kernels):
    engine = Engine(kernels)
    batch, builder = engine.batch, engine.builder
    engine.add("a", [5, 6])
    other = Engine(kernels)
    other.add("a", [5, 6])
    of_another_batch = other.builder.build({"a": 1})
    for make, error, text in (
        (lambda: batch.column("ids", np.int32), ValueError, "^name: the batch has a column 'ids'"),
        (lambda: batch.column("no name", np.int32), ValueError, "^name"),
        (lambda: batch.column("word", np.str_), TypeError, "^dtype"),
        (lambda: batch.token_column("more", width=0), ValueError, "^width"),
        (lambda: builder.register_column(np.zeros(3)), TypeError, "^column: .* is not a column"),
        (lambda: builder.register_column(engine.ids), ValueError, "^column: 'ids' is registered already"),
        (lambda: builder.register_column(batch.column("seq_lens", np.int32)), ValueError, "^column: 'seq_lens' is not"),
        (lambda: builder.register_column(Engine(kernels).ids), ValueError, "^column: 'ids' is another batch's"),
        (lambda: engine.ids.__setitem__("a", 0.5), TypeError, "^value"),
        (lambda: engine.ids.__setitem__("a", 1 << 40), ValueError, "^value: 1099511627776 does not fit int32"),
        (lambda: engine.ids.__setitem__("nobody", 1), ValueError, "^req_id"),
        (lambda: engine.ids.__setitem__("a", [1, 2]), ValueError, r"^value: \[1, 2\] for a column of width 1"),
        (lambda: engine.ids.__setitem__("a", []), ValueError, r"^value: \[\] for a column of width 1"),
        (
            lambda: engine.heat.__setitem__("a", torch.ones(1, requires_grad=True)),
            TypeError,
            "^value: tensor.* is not of",
        ),
        (lambda: "a" in engine.heat, TypeError, "not a container|not iterable"),
        (lambda: list(engine.heat), TypeError, "not iterable"),
        (lambda: batch.token_column("half", np.float16, unknown=70000), ValueError, "^unknown: 70000 does not fit"),
        (lambda: engine.ids.give("a", [[1]]), ValueError, "^tokens"),
        (lambda: engine.ids.give("nobody", [1]), ValueError, "^req_id"),
        (lambda: engine.ids.give("a", ["x"]), TypeError, "^tokens"),
        (lambda: engine.ids.write(builder.build({"a": 1}), []), ValueError, "^values"),
        (
            lambda: engine.heat.__setitem__("a", "warm"),
            TypeError,
            "^value: 'warm' is not of float64, as column 'heat'",
        ),
        (lambda: engine.ids.write(None, [3]), TypeError, "^metadata: None is no step; pass what build"),
        (lambda: engine.ids.leave(None), TypeError, "^metadata: None is no step"),
        (lambda: engine.ids.write(of_another_batch, [3]), ValueError, "^metadata: a step of another batch .* 'ids'"),
        (lambda: builder.register_column(batch.column("late", np.int32)), CaptureError, "^register_column: steps were"),
    ):
        with pytest.raises(error, match=text):
            make()
    engine.ids.write(builder.last_metadata, [3])


def test_there_are_as_many_columns_as_the_kernels_take(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=BLOCK, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    for number in range(16):
        builder.register_column(batch.column(f"number{number}", np.int8))
    with pytest.raises(ValueError, match=r"^column: 16 are registered"):
        builder.register_column(batch.column("one_more", np.int8))
    batch.add_request("a", [1])
    batch._core.columns["number7"]["a"] = 7
    assert builder.build().number7.tolist() == [7]


def test_a_column_says_what_it_is():
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    assert repr(batch.column("temperature", np.float32)) == "<Column: 'temperature', float32>"
    assert repr(batch.token_column("ids", width=3)) == "<TokenColumn: 'ids', int64, 3 of each request>"


@pytest.mark.parametrize(("dtype", "fits", "beyond"), [(np.uint8, 255, 256), (np.bool_, 1, 2), (np.int8, -128, 128)])
def test_ints_are_taken_by_value(dtype, fits, beyond):
    """A Python int is signed for NumPy, whatever it is."""
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    batch.add_request("a", [1])
    column = batch.column("mine", dtype)
    column["a"] = fits
    assert column["a"] == fits
    with pytest.raises(ValueError, match=rf"^value: {beyond} does not fit {np.dtype(dtype)}, as column 'mine' is"):
        column["a"] = beyond
    with pytest.raises(TypeError, match=r"^value: 0\.5 is not of "):
        column["a"] = 0.5
    assert column["a"] == fits


def test_a_float_that_becomes_infinite_is_refused():
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    batch.add_request("a", [1])
    column = batch.column("mine", np.float32)
    column["a"] = np.inf
    with pytest.raises(ValueError, match=r"^value: 1e\+300 does not fit float32, as column 'mine' is"):
        column["a"] = 1e300
    assert column["a"] == np.inf


def test_values_of_a_request_are_no_later_ones_of_its_name(kernels):
    engine = Engine(kernels)
    engine.add("a", [10, 11])
    engine.add("b", [12, 13])
    step = engine.builder.build({"a": 2, "b": 2})
    engine.remove("a")
    engine.add("a", [20, 21])
    engine.ids.write(step, [98, 99])
    assert (engine.ids["a"], engine.ids["b"]) == (0, 99)
    engine.ids["a"] = 7
    engine.ids.leave(step)
    assert (engine.ids["a"], engine.ids["b"]) == (7, 0)
    later = engine.builder.build({"a": 2, "b": 0})
    engine.ids.write(later, np.array([5]))
    assert engine.ids["a"] == 5


def test_tokens_that_are_given_are_all_there_or_none_is(kernels):
    engine = Engine(kernels)
    engine.add("a", [1, 2])
    for count in range(2_000):
        with AtOpcode(count) as interrupt:
            engine.ids.give("a", [3, 4, 5])
        metadata = engine.builder.build({"a": 2})
        assert metadata.ids.tolist() in ([1, 2], [3, 4])
        engine.batch.rollback("a", 2)
        if not interrupt.fired:
            return
        engine.ids.give("a", [1, 2])
    pytest.fail("no call came to its end")
