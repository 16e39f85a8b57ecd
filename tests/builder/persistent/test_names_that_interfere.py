"""Names whose ``__hash__`` changes the batch, or is interrupted, while the batch reads the names after a roll-back."""

import pytest

from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError


class Interrupt(BaseException):
    """What a signal's handler raises, at any place."""


class Name:
    """Equal names have equal numbers; ``then`` is called by the next hash."""

    then = None

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        then, Name.then = Name.then, None
        if then is not None:
            then()
        return self.number

    def __eq__(self, other):
        return isinstance(other, Name) and self.number == other.number


def interrupt():
    raise Interrupt


@pytest.fixture
def batch(kernels):
    """Of "b", a Name and "c", in a batch whose names are read anew by the next call: a build was taken back."""
    made = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    for row, name in enumerate(("b", Name(5), "c")):
        made.add_request(name, [3 * row + 1, 3 * row + 2, 3 * row + 3], 4)
    builder = MetadataBuilder(made, max_num_batched_tokens=64)
    builder.register_field("x", "int32", "request", lambda metadata, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        builder.build({"b": 2})
    yield made
    Name.then = None


def test_a_request_that_leaves_while_the_names_are_read_is_gone(batch):
    Name.then = lambda: batch.remove_request("b")
    assert "b" not in batch
    assert batch.add_request("d", [11, 12], 2) == 0
    with pytest.raises(ValueError, match="req_id: 'b' is not in the batch"):
        batch.append_blocks("b", [13])
    assert (batch.block_ids("d"), batch.num_computed_tokens("c")) == ([11, 12], 4)


def test_a_request_that_joins_while_the_names_are_read_is_there(batch):
    Name.then = lambda: batch.add_request("d", [11], 1)
    assert "d" in batch
    assert batch.num_computed_tokens("d") == 1


def test_rows_that_change_places_while_the_names_are_read(batch):
    Name.then = lambda: batch.swap_rows(0, 2)
    assert batch.block_ids("b") == [1, 2, 3]


def test_names_that_change_the_batch_each_time_are_refused(batch):
    def change():
        batch._core.order.changes += 1
        Name.then = change

    Name.then = change
    with pytest.raises(ConcurrentUseError, match="change while they are looked up"):
        _ = "b" in batch
    Name.then = None
    assert "b" in batch


@pytest.mark.parametrize(
    "look_up",
    [
        lambda batch: Name(5) in batch,
        lambda batch: batch.num_computed_tokens("b"),
        lambda batch: batch.num_computed_tokens(batch.req_ids[1]),
        lambda batch: batch.add_request("d", [11], 1),
        lambda batch: batch.remove_request("b"),
        lambda batch: batch.remove_request(batch.req_ids[1]),
    ],
)
def test_an_interrupt_while_the_names_are_read_comes_out_and_loses_no_request(batch, look_up):
    before = batch.req_ids
    Name.then = interrupt
    with pytest.raises(Interrupt):
        look_up(batch)
    assert batch.req_ids == before
    assert all(name in batch for name in ("b", Name(5), "c"))
    with pytest.raises(ValueError, match="is in the batch already"):
        batch.add_request(Name(5), [11], 1)


def test_an_interrupt_of_a_removal_removes_nothing(batch):
    name = batch.req_ids[1]
    assert name in batch

    def later():
        Name.then = interrupt  # after the look-up

    Name.then = later
    with pytest.raises(Interrupt):
        batch.remove_request(name)
    assert (name in batch, len(batch)) == (True, 3)
    assert batch.remove_request(name) == [4, 5, 6]


def test_a_name_whose_hash_has_changed_is_removed_by_identity(batch):
    name = batch.req_ids[1]
    assert name in batch
    name.number = 6
    assert batch.remove_request(name) == [4, 5, 6]
    name.number = 5
    assert (name in batch, batch.req_ids) == (False, ("b", "c"))
