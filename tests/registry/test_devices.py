"""Devices and patterns."""

import pytest

from attncore.registry.device_patterns import best_match, canonical, is_pattern, specificity


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
