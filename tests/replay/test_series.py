"""What the plots of a replay show: timelines and histograms."""

from array import array

import pytest

from attncore.replay.results.measurements import Steps
from attncore.replay.results.series import NUM_BINS, histogram, in_bins, timeline


def steps(*rows):
    """Steps of (start, end, requests, prompt tokens, decode tokens)."""
    found = Steps()
    for start, end, requests, prefill, decode in rows:
        found.starts.append(start)
        found.ends.append(end)
        found.requests.append(requests)
        found.prefill_tokens.append(prefill)
        found.decode_tokens.append(decode)
    return found


def test_a_step_stands_in_every_bin_that_it_touches():
    found = timeline(steps((0.0, 2.0, 3, 10, 2), (2.0, 3.0, 5, 0, 5), (239.0, 240.0, 1, 0, 1)))
    assert found["bin_s"] == 1
    assert found["requests"][:4] == [3, 3, 5, 0]
    assert found["prefill_tokens"][:3] == [5, 5, 0]
    assert found["decode_tokens"][:3] == [1, 1, 5]
    assert found["requests"][-1] == 1
    assert [sum(found[name]) for name in ("prefill_tokens", "decode_tokens")] == [10, 8]


def test_several_steps_of_a_bin_are_the_most_requests_and_all_tokens():
    found = timeline(steps(*((i / 10, (i + 1) / 10, i % 7, 1, 2) for i in range(24_000))))
    assert set(found["requests"]) == {6}
    assert sum(found["prefill_tokens"]) == pytest.approx(24_000)
    assert sum(in_bins("decode_tokens", found["decode_tokens"], 50)) == pytest.approx(48_000)
    assert in_bins("requests", found["requests"], 50) == [6] * 48


@pytest.mark.parametrize(("most", "count"), [(0, 1), (1, 1), (7, 6), (48, 48), (59, 48), (200, 120), (999, NUM_BINS)])
def test_bins_divide_the_timeline(most, count):
    values = list(range(NUM_BINS))
    assert in_bins("requests", values, most)[-1] == NUM_BINS - 1
    assert len(in_bins("decode_tokens", values, most)) == count


def test_steps_that_take_no_time_have_no_timeline():
    assert timeline(steps((0.0, 0.0, 1, 1, 0)))["bin_s"] == 0
    assert timeline(Steps())["requests"] == [0] * NUM_BINS


def test_builds_are_counted_by_time():
    found = histogram(array("q", [2000, 4999, 5000, 1_200_000]), array("q", [300, 999, 1000]))
    assert found["from_us"][0] == 0.2
    assert found["from_us"][-1] == 1000
    by_edge = dict(zip(found["from_us"], zip(found["cold"], found["hot"], strict=True), strict=True))
    assert by_edge[0.2] == (0, 1)
    assert by_edge[0.5] == (0, 1)
    assert by_edge[1] == (0, 1)
    assert by_edge[2] == (2, 0)
    assert by_edge[5] == (1, 0)
    assert by_edge[1000] == (1, 0)
    assert (sum(found["cold"]), sum(found["hot"])) == (4, 3)


def test_without_cold_builds_there_are_hot_ones_alone():
    found = histogram(array("q"), array("q", [0, 7]))
    assert (found["cold"], sum(found["hot"])) == ([], 2)
    assert histogram(array("q"), array("q")) == {"from_us": [], "cold": [], "hot": []}
