"""The numbers of attncore/kernels/codes.py are those of the C enums."""

import re
from pathlib import Path

import pytest

from attncore.kernels import codes

CYTHON = Path(codes.__file__).parent / "cython"
ENUMS = (CYTHON / "codes.pxi").read_text()


def c_numbers(source):
    return {name: int(value, 0) for name, value in re.findall(r"^    ([A-Z_0-9]+) = (-?\w+)", source, re.M)}


def python_numbers():
    return {name: value for name, value in vars(codes).items() if name.isupper()}


def test_the_c_enums_are_the_codes():
    assert c_numbers(ENUMS) == python_numbers()
    assert len(python_numbers()) > 30


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("HEADER_TOKENS = 2", "HEADER_TOKENS = 3"), ("PAD_SLOT_ID = -1", "PAD_SLOT_ID = 0"), ("    SYNCED = 3\n", "")],
)
def test_a_wrong_enum_is_found(right, wrong):
    assert right in ENUMS
    assert c_numbers(ENUMS.replace(right, wrong)) != python_numbers()


def test_a_header_has_a_word_for_each_group():
    """The last group is the cross group, beside MAX_GROUPS decoder groups."""
    max_groups = c_numbers((CYTHON / "types.pxi").read_text())["MAX_GROUPS"]
    assert codes.HEADER_COUNTS + max_groups + 1 <= codes.HEADER_WORDS
