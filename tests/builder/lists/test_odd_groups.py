"""Groups whose numbers and tables are of other kinds than ints and lists: they count as what they say."""

import collections

import numpy as np
import pytest
import torch
from builder.lists.decodes import fields

from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup


class Number:
    """An integer by ``__index__`` alone, without a hash."""

    __hash__ = None

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class AlikeNumber(Number):
    """Equal to every other."""

    __hash__ = lambda self: 0  # noqa: E731

    def __eq__(self, other):
        return True


class OtherItems(tuple):
    """A sequence that answers an index with something else."""

    def __getitem__(self, index):
        raise KeyError(index)


KINDS = [np.array, torch.tensor, np.int64, Number, AlikeNumber]


def group(*sequences):
    return [SequenceGroup(False, list(sequences))]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_compared_as_numbers(kernels, kind):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    step = builder.build(group(Sequence(kind(5), 1, 3, [5]), Sequence(kind(-2), 1, 3, [6]), Sequence(4, 1, 3, [7])))
    assert step.slot_mapping.tolist() == [23, 27, 31]
    with pytest.raises(ValueError, match=r"^groups\[0\].sequences\[2\].seq_id: 5 stands twice in its group"):
        builder.build(group(Sequence(kind(5), 1, 3, [5]), Sequence(4, 1, 3, [6]), Sequence(kind(5), 1, 3, [7])))


def test_a_sequence_is_what_the_tuple_holds(kernels):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    right, alike = OtherItems((0, 1, 3, [5])), OtherItems((0, 1, 3, [6]))
    assert builder.build(group(right, Sequence(1, 1, 3, [6]))).slot_mapping.tolist() == [23, 27]
    with pytest.raises(ValueError, match="stands twice"):
        builder.build(group(right, alike))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "query_len", "context_len", "message"),
    [
        ("common", 1, 5, "block_table: sequence 0 holds 1 block but needs 2 for its 6 tokens"),
        ("common", 2**31 - 1, 1, "query_len: 2147483647 on top of context_len 1 does not fit int32"),
        ("rocm", 2, 1, "query_len: 2 on a decode"),
    ],
)
def test_refusals_state_the_numbers(kernels, kind, layout, query_len, context_len, message):
    with pytest.raises(ValueError, match=message):
        CommonMetadataBuilder(4, layout, kernels=kernels).build(
            group(Sequence(kind(0), kind(query_len), kind(context_len), [1]))
        )


class Sized:
    """Can be read, and has no items by index."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __iter__(self):
        return iter(self.ids)


@pytest.mark.parametrize("kind", [Sized, collections.deque, lambda ids: dict.fromkeys(ids).keys()])
@pytest.mark.parametrize("pad", [-1, 0])
def test_a_step_advances_whatever_its_tables_are(kernels, kind, pad):
    builder = CommonMetadataBuilder(4, kernels=kernels, max_seq_len_to_capture=8)
    step, longer = (builder.build(group(Sequence(0, 1, context, kind([5, 7]))), pad) for context in (3, 4))
    builder.advance_step(step)
    assert fields(step) == fields(longer)


@pytest.mark.parametrize("kind", [list, collections.deque, Sized])
def test_tables_that_grow_are_read_as_they_are_then(kernels, kind):
    builder = CommonMetadataBuilder(4, "flashinfer", kernels=kernels, max_seq_len_to_capture=16)
    ids = [5]
    table = ids if kind is list else kind(ids)
    step = builder.build(group(Sequence(0, 1, 2, table)), 0)
    (table.ids if kind is Sized else table).extend([7, 8, 9, 10, 11])  # more than the captured table has columns for
    builder.advance_step(step)
    assert step.block_table.tolist() == [[5, 7, 8, 9]]
