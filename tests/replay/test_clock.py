"""The cost model: arithmetic and its text."""

import pytest

from attncore.replay.scheduling.cost_model import CostModel


def test_seconds_by_hand():
    model = CostModel(step=1000, prefill=10, decode=100, context=0.5)
    assert model.seconds(20, 3, 400) == pytest.approx((1000 + 200 + 300 + 200) * 1e-6)


def test_text_names_what_differs_from_the_defaults():
    assert CostModel.parse("prefill=1.5, step=7") == CostModel(step=7, prefill=1.5)
    model = CostModel(0.1, 2, 3, 1e-7)
    assert CostModel.parse(str(model)) == model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "clock: ''"),
        ("6000", "clock: '6000' is not NAME=MICROSECONDS"),
        ("stp=1", "step, prefill, decode, context"),
        ("step", "step is ''"),
        ("step=x", "step is 'x'"),
        ("step=-1", "step is '-1'"),
        ("step=nan", "step is 'nan'"),
        ("step=inf", "step is 'inf'"),
        ("step=1,step=2", "step is given twice"),
    ],
)
def test_bad_text_is_named(text, words):
    with pytest.raises(ValueError, match=r"^clock: ") as caught:
        CostModel.parse(text)
    assert words in str(caught.value)
