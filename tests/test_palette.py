"""The colours of pages and pictures can be read: the contrast of WCAG 2, at least 4.5 to 1 for texts."""

import itertools
import pathlib
import runpy

import pytest

from attncore.palette import DARK, FILLS, LIGHT, variables

contrast = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "docs" / "site" / "contrast.py"))["contrast"]


def test_the_formula_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_lines_can_be_read(scheme):
    series = scheme.series + scheme.more_series
    pairs = [(colour, scheme.paper) for colour in (scheme.ink, scheme.muted, scheme.line, *series)]
    pairs += itertools.product((scheme.ink, scheme.muted), scheme.fills)
    assert len(set(series)) == len(series) == 15
    assert not [(one, behind, found) for one, behind in pairs if (found := contrast(one, behind)) < 4.5]


def test_both_schemes_are_variables_of_css():
    text = variables()
    assert text.count("--ink: ") == 2
    assert all(f"--fill-{name}: {colour}" in text for name, colour in zip(FILLS, LIGHT.fills, strict=True))
    assert text.index(LIGHT.paper) < text.index("prefers-color-scheme: dark") < text.index(DARK.paper)
