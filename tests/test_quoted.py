"""Values in messages: short, printable, and made of any object."""

import sys
import types
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from attncore.quoted import MOST, one_line, quoted, quoted_json


class Hostile:
    def __repr__(self):
        raise RuntimeError("not this one")


class Loud:
    def __repr__(self):
        return "\x1b[31m" * 1000


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = [
    "x" * 10**6, "\x1b[31m\x7f\u202e\ud800", b"y" * 10**6, 10**5000, -(10**5000), [1] * 10**6, {"a": "b" * 10**6},
    nested(10**5), Hostile(), Loud(), [Hostile()], {Hostile(): 1}, range(10**9), float("nan"), None, set(range(10**5)),
    np.broadcast_to(np.int32(1), (2,) * 32), torch.ones(1).expand((2,) * 32), [np.broadcast_to("\x1b", (9,) * 16)],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_any_value_is_short_and_printable(value):
    text = quoted(value)
    assert 0 < len(text) <= MOST
    assert text.isprintable()


def test_arrays_of_many_dimensions_are_not_printed():
    """NumPy and torch print all numbers of dimensions of two."""
    small = np.broadcast_to(np.int32(7), (2,) * 32), torch.ones(1).expand((2,) * 32)
    for value in (*small, [small[0]], {"a": small[1]}):
        text = quoted(value)
        assert text.isprintable()
        assert "of shape (2, 2, " in text
    assert quoted(np.array([1, 2])) == "array([1, 2])"


def test_a_tensor_without_a_shape_and_half_a_library(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its nested tensors
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert quoted(nested).startswith("nested_tensor(")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert quoted(Fraction(1, 2)) == "Fraction(1, 2)"


JSON = [
    "x" * 10**6,
    "\x1b\x7f\u202e\ud800",
    10**5000,
    [1] * 10**6,
    {"a": "b" * 10**6},
    nested(10**5),
    float("nan"),
    True,
]


@pytest.mark.parametrize("value", JSON, ids=range(len(JSON)))
def test_any_value_of_json_is_short_and_printable(value):
    assert 0 < len(quoted_json(value)) <= 40
    assert quoted_json(value).isprintable()


@pytest.mark.parametrize("value", [3, -1, "a", "é", None, [1, [2]], {"a": 1}, 1.5, True])
def test_short_values_are_as_they_are(value):
    import json

    assert quoted(value) == repr(value)
    assert quoted_json(value) == json.dumps(value)


@pytest.mark.parametrize("most", [60, MOST, 4000])
@pytest.mark.parametrize("text", ["\x00", "x", "\U000e0001", " ", "a \n", "\u202e", "\ud800"])
def test_text_of_others_is_one_line_of_at_most_so_many_characters(text, most):
    for times in (1, most // 10, most - 1, most, most + 1, 10**6):
        line = one_line(text * times, most)
        assert len(line) <= most
        assert line.isprintable()
        assert line.endswith(f" ... ({len(text) * times} letters)") or (text * times).isspace() or times < 10**6


def test_short_text_of_others_is_whole():
    assert one_line("a\n b\x1b[31m\t") == "a b\\x1b[31m"
    assert one_line("") == ""
    assert one_line("x" * MOST, MOST) == "x" * MOST
    assert one_line(Loud(), 60).startswith("\\x1b[31m")
    assert one_line(Hostile()) == ""
