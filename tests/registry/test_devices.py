"""Devices and patterns."""

import random
from itertools import combinations

import pytest

from attncore.registry import device_patterns
from attncore.registry.device_patterns import (
    best_match,
    canonical,
    in_order,
    is_pattern,
    specificity,
    without_contained,
)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cuda:sm_90", "cuda:sm_90"),
        ("sm_90", "cuda:sm_90"),
        ("SM_120", "cuda:sm_120"),
        ("gfx942", "rocm:gfx942"),
        ("rocm:gfx90a", "rocm:gfx90a"),
        ("gfx1100", "rocm:gfx1100"),
        (" cpu ", "cpu"),
    ],
)
def test_bare_forms(given, name):
    assert canonical(given) == name


@pytest.mark.parametrize("given", ["", "cuda", "gpu", "sm_9", "sm_90a", "cuda:gfx942", "rocm:sm_90", "h100", 90, None])
def test_other_words_are_refused(given):
    with pytest.raises(ValueError, match="device: "):
        canonical(given)


def test_closer_patterns_are_more_specific():
    patterns = ["any", "cuda", "cuda:sm_80+", "cuda:sm_90+", "cuda:sm_90"]
    found = [specificity(pattern, "cuda:sm_90") for pattern in patterns]
    assert all(found)
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert specificity("rocm:gfx9*", "rocm:gfx942") < specificity("rocm:gfx94*", "rocm:gfx942")


@pytest.mark.parametrize(
    ("pattern", "device"),
    [
        ("cuda:sm_90+", "cuda:sm_89"),
        ("cuda:sm_90", "cuda:sm_100"),
        ("cuda", "cpu"),
        ("rocm", "cuda:sm_90"),
        ("rocm:gfx9*", "rocm:gfx1100"),
        ("cpu", "cuda:sm_90"),
    ],
)
def test_patterns_do_not_match_what_they_do_not_name(pattern, device):
    assert specificity(pattern, device) is None


def test_capabilities_are_numbers_not_text():
    assert specificity("cuda:sm_90+", "cuda:sm_100") is not None


def test_the_closest_entry_counts_not_the_largest():
    assert best_match({"any": 90, "cuda": 50, "cuda:sm_90": 10}, "cuda:sm_90")[:2] == (10, "cuda:sm_90")
    assert best_match({"cuda:sm_80+": 1, "cuda:sm_75+": 2}, "cuda:sm_90")[:2] == (1, "cuda:sm_80+")
    assert best_match({"rocm": 1}, "cpu") is None


@pytest.mark.parametrize("word", ["cuda:sm_80+", "rocm:gfx11*", "any", "rocm:gfx942", "cpu", "rocm:gfx90a"])
def test_patterns(word):
    assert is_pattern(word)


@pytest.mark.parametrize("word", ["cuda:*", "sm_90", "rocm:gfx942+", "cpu+", "", 3])
def test_no_patterns(word):
    assert not is_pattern(word)


ORDER = [
    "any", "cpu", "cuda", "cuda:sm_75", "cuda:sm_75+", "cuda:sm_80", "cuda:sm_80+", "cuda:sm_90", "cuda:sm_100",
    "cuda:sm_120+", "rocm", "rocm:gfx9*", "rocm:gfx908", "rocm:gfx90a", "rocm:gfx94*", "rocm:gfx942", "rocm:gfx950",
    "rocm:gfx1*", "rocm:gfx1030", "rocm:gfx11*", "rocm:gfx110*", "rocm:gfx1100", "rocm:gfx1151", "rocm:gfx120*",
]  # fmt: skip
DEVICES = [
    "cpu", "cuda:sm_70", "cuda:sm_75", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120",
    "rocm:gfx906", "rocm:gfx908", "rocm:gfx90a", "rocm:gfx940", "rocm:gfx942", "rocm:gfx950", "rocm:gfx1030",
    "rocm:gfx1100", "rocm:gfx1101", "rocm:gfx1151", "rocm:gfx1200",
]  # fmt: skip


def test_texts_name_devices_from_the_oldest_hardware_to_the_newest():
    assert all(map(is_pattern, ORDER))
    assert in_order(random.Random(1).sample(ORDER, len(ORDER))) == ORDER


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ({"cuda:sm_90": 55, "cuda:sm_80+": 50}, ["cuda:sm_80+"]),
        ({"cuda:sm_80+": 55, "cuda:sm_90": 60, "cuda:sm_100+": 60}, ["cuda:sm_80+"]),
        ({"cuda:sm_90": 1, "cuda:sm_75": 1}, ["cuda:sm_75", "cuda:sm_90"]),
        ({"cuda:sm_90+": 1, "cuda:sm_90": 1, "cuda:sm_89": 1}, ["cuda:sm_89", "cuda:sm_90+"]),
        ({"rocm:gfx1100": 1, "rocm:gfx11*": 1, "rocm:gfx942": 1, "cuda": 1}, ["cuda", "rocm:gfx942", "rocm:gfx11*"]),
        ({"any": 0, "cpu": 1, "cuda": 2, "cuda:sm_80+": 3, "rocm:gfx9*": 4}, ["any"]),
        ({"cpu": 1}, ["cpu"]),
        ({}, []),
    ],
)
def test_what_another_entry_contains_is_not_named(patterns, named):
    assert without_contained(patterns) == named


def test_devices_without_those_contained_are_the_same_devices():
    for patterns in combinations(ORDER, 3):
        named = without_contained(patterns)
        for device in DEVICES:
            matched = best_match(dict.fromkeys(patterns, 1), device)
            assert (matched is None) == (best_match(dict.fromkeys(named, 1), device) is None)
        for one in named:  # no entry is named for nothing, but one of a single device that is not in DEVICES
            of_one = [device for device in DEVICES if best_match({one: 1}, device)]
            others = [device for device in of_one if best_match(dict.fromkeys({*named} - {one}, 1), device)]
            assert not of_one or others != of_one


def test_two_patterns_of_the_same_devices_are_one():
    assert len(without_contained(["cuda:sm_80+", "cuda:sm_080+"])) == 1
    assert without_contained(["cuda:sm_90", "cuda:sm_90+"]) == ["cuda:sm_90+"]


def test_what_a_device_is_sold_as_is_told_by_its_name_here():
    for sold_as, name in device_patterns._SOLD_AS.items():
        assert device_patterns.canonical(name).endswith(f":{name}")
        with pytest.raises(ValueError, match=rf"; {sold_as.upper()} is {name}$"):
            device_patterns.canonical(sold_as)
    with pytest.raises(ValueError, match=r"gfx942 or cpu$"):
        device_patterns.canonical("banana")
