"""Integer arguments: each is converted once, where it enters, and what is no integer is refused, for every parameter.

``integer_calls.CALLS`` has a call for each public parameter that is annotated ``int``. A parameter without an entry
fails here.
"""

import numpy as np
import pytest
import torch
from integer_calls import CALLS, NOT_CONVERTED
from integers import parameters

from attncore import arguments

WIDTHS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


class Liar:
    """An integer with an ``__index__`` alone, which answers differently at the second call."""

    def __init__(self, value):
        self.answers = iter([value])

    def __index__(self):
        return next(self.answers, 10**6)


class Raises:
    def __index__(self):
        raise LookupError("no number here")


class Interrupted:
    def __index__(self):
        raise KeyboardInterrupt


def test_every_public_integer_has_an_entry():
    found = parameters()
    assert found - CALLS.keys() - NOT_CONVERTED.keys() == set()
    assert (CALLS.keys() | NOT_CONVERTED.keys()) - found == set()


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_every_kind_do_the_same(name):
    value, call = CALLS[name]
    expected = call(value)
    for width in WIDTHS:
        assert call(width(value)) == expected, width
    for other in (np.array(value), torch.tensor(value), torch.tensor(value, dtype=torch.uint8), Liar(value)):
        assert call(other) == expected, other


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_integer_is_refused(name):
    value, call = CALLS[name]
    for wrong in (
        True, np.True_, np.array(True), torch.tensor(True), float(value), np.float32(value), np.array(float(value)),
        torch.tensor(float(value)), torch.tensor([value]), np.array([value]), str(value), Raises(),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as caught:
            call(wrong)
        assert ": " in str(caught.value), wrong


def test_an_index_that_raises_is_the_cause():
    with pytest.raises(TypeError, match=r"size: .* is not an integer: its __index__ raised LookupError: ") as caught:
        arguments.integer("size", Raises(), 0)
    assert isinstance(caught.value.__cause__, LookupError)
    assert arguments.integer_or_none(Raises()) is None
    with pytest.raises(KeyboardInterrupt):
        arguments.integer("size", Interrupted(), 0)


def test_the_int_is_a_plain_one():
    class Named(int):
        def __index__(self):
            return 9

        def __int__(self):
            return 9

    number = arguments.integer("size", Named(3), 0)
    assert (type(number), number) == (int, 3)
