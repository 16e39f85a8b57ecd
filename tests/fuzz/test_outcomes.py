"""What the targets judge by can fail: outcomes of calls, and the objects that lie."""

import numpy as np
import pytest
from fuzz.hostile import INTEGERS, SEQUENCES, mappings
from fuzz.lying_objects import FromObject, Stop
from fuzz.outcomes import ADDRESS, outcome, plain


def raising(error):
    raise error


def test_an_answer_and_a_refusal():
    assert outcome(lambda: 3) == ("answer", 3)
    assert outcome(raising, ValueError("rows: row 1 is bad")) == ("refused", ValueError, "rows: row 1 is bad")
    assert outcome(raising, FromObject()) == ("stopped", FromObject)
    assert outcome(raising, Stop()) == ("stopped", Stop)


@pytest.mark.parametrize(
    "error", [TypeError("'>' not supported between instances of 'Index' and 'int'"), ValueError("")]
)
def test_an_error_without_a_name_fails(error):
    """These asserts stand in no test module: python -O has to keep them (make test-dev)."""
    with pytest.raises(AssertionError, match="does not begin with an argument's name"):
        outcome(raising, error)


@pytest.mark.parametrize("error", [OverflowError("x: y"), IndexError("x: y"), RuntimeError("x: y"), KeyError("x: y")])
def test_other_errors_fail(error):
    with pytest.raises(type(error)):
        outcome(raising, error)


def test_arrays_are_compared_by_type_and_bytes():
    assert plain([np.array([1, 2], np.int32)]) == plain([np.array([1, 2], np.int32)])
    assert plain(np.array([1, 2], np.int32)) != plain(np.array([1, 2], np.int64))
    assert plain((1,)) != plain([1])


def test_objects_are_new_each_time_and_print_the_same():
    for recipe in [*INTEGERS, *SEQUENCES, *mappings("r0")]:
        assert ADDRESS.sub("", repr(recipe())) == ADDRESS.sub("", repr(recipe()))
