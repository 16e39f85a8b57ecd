"""attncore.chart_page: what the pages of a replay and of the saved benchmark runs share."""

import re

import pytest

from attncore import chart_page
from attncore.palette import DARK


@pytest.mark.parametrize(("low", "high", "ends"), [(3e-7, 3e-5, (2e-7, 5e-5)), (1e-6, 1e-6, (1e-6, 2e-6))])
def test_the_scale_encloses_what_it_shows(low, high, ends):
    found = chart_page.ticks(low, high)
    assert (found[0], found[-1]) == pytest.approx(ends)


def test_a_page_without_charts_has_no_script():
    text = chart_page.page("a <title>", chart_page.table((), [("b", 1)]))
    assert "<title>a &lt;title&gt;</title>" in text
    assert "<tr><td>b</td><td>1</td></tr>" in text
    assert "<script" not in text
    assert "<th>" not in text


def test_a_page_follows_the_readers_scheme():
    text = chart_page.page("title", "")
    assert "prefers-color-scheme: dark" in text
    assert f"--ink: {DARK.ink}" in text


def test_a_chart_of_many_lines_takes_the_colours_of_the_page():
    pytest.importorskip("pygal", reason="pygal draws charts; attncore[html] has it")
    pytest.importorskip("pygaljs", reason="pygal draws charts; attncore[html] has it")
    chart = chart_page.library().Line(**chart_page.settings("title"))
    for number in range(12):
        chart.add(str(number), [number])
    found = re.findall(r"\.color-\d+[^{]*\{\s*stroke:\s*([^;]+);", chart.render(is_unicode=True))
    assert len(set(found[:10])) == 10
    assert all("var(--" in colour for colour in found)
