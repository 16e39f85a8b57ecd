"""Requests whose names have code of their own that raises: a roll-back calls none of it."""

import pytest

from attncore.builder import InputBatch, MetadataBuilder


class Broken(BaseException):
    """What no ``except Exception`` catches."""


class Name:
    """All names have one hash, so that looking one up compares it with others; from ``raises`` on that is an error."""

    raises = None

    def __hash__(self):
        return 1

    def __eq__(self, other):
        if Name.raises is not None:
            raise Name.raises("__eq__")
        return self is other


@pytest.fixture(params=[RuntimeError, Broken])
def breaks(request, monkeypatch):
    return lambda: monkeypatch.setattr(Name, "raises", request.param)


@pytest.fixture
def batch(kernels):
    return InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)


def rows(batch):
    return batch.req_ids, [batch.num_computed_tokens(name) for name in batch.req_ids], len(batch)


def test_a_removal_that_is_taken_back(batch, breaks, monkeypatch):
    names = [Name() for _ in range(3)]
    for index, name in enumerate(names):
        batch.add_request(name, [3 * index + 1, 3 * index + 2], index)
    core = batch._core
    clears = core.clear

    def clear(row):
        clears(row)
        breaks()
        raise ValueError("in the middle")

    monkeypatch.setattr(core, "clear", clear)
    with pytest.raises(ValueError, match="in the middle"):
        batch.remove_request(names[1])
    assert not core.state.unfinished
    assert rows(batch) == (tuple(names), [0, 1, 2], 3)
    assert batch.block_ids(names[1]) == [4, 5]
    monkeypatch.setattr(core, "clear", clears)
    assert batch.remove_request(names[1]) == [4, 5]  # found by identity, though it cannot be compared
    assert rows(batch) == ((names[0], names[2]), [0, 2], 2)
    monkeypatch.setattr(Name, "raises", None)
    assert MetadataBuilder(batch, max_num_batched_tokens=16).build().seq_lens.tolist() == [1, 3]


def test_a_build_that_moves_rows_and_is_taken_back(batch, breaks, monkeypatch):
    names = [Name() for _ in range(3)]
    for index, name in enumerate(names):
        batch.add_request(name, [3 * index + 1, 3 * index + 2], index)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)

    def fill(metadata, out):
        breaks()
        raise ValueError("no values")

    builder.register_field("extra", "int32", "request", fill)
    with pytest.raises(ValueError, match="no values"):
        builder.build({names[0]: 3})
    assert not batch._core.state.unfinished
    assert builder.last_step == -1
    assert rows(batch) == (tuple(names), [0, 1, 2], 3)


def test_a_name_that_is_not_there_is_still_refused(batch):
    batch.add_request("a", [1])
    with pytest.raises(ValueError, match="req_id: 'b' is not in the batch"):
        batch.remove_request("b")
    with pytest.raises(ValueError, match="req_id: None is not in the batch"):
        batch.remove_request(None)
    with pytest.raises(TypeError, match="cannot name a request"):
        batch.remove_request(["a"])


def test_a_request_that_another_thread_adds_meanwhile_is_found(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4, kernels=kernels)
    name = "a"
    batch.add_request(name, [1])

    class Late(dict):
        def __missing__(self, key):
            self[key] = 0
            raise KeyError(key)

    batch._core.order.known = Late()
    assert batch.num_computed_tokens(name) == 0
