"""attncore bench: what the process of a pass answers is read with suspicion."""

import json
from pathlib import Path

import pytest

from attncore.testing.bench import run as runs
from attncore.testing.bench.answer import DONE, FIGURES, SETTINGS, read_pass
from attncore.testing.bench.run import PassError, Question, measure

ROW = {"step": "decode of 1", "part": "plan", **dict.fromkeys(FIGURES, 1e-6)}
CONFIG = {"config": dict.fromkeys(SETTINGS, 1)}
PHASE, END = {"phase": "while it was tried"}, {"phase": DONE}


def test_a_good_answer_is_read():
    alone = {**ROW, "part": "build", "to_reference": None}
    found = read_pass([PHASE, CONFIG, {"row": ROW}, {"row": alone}, {"unsupported": {"a step": "no\nkernel"}}, END], "")
    assert found.rows.keys() == {("decode of 1", "plan"), ("decode of 1", "build")}
    assert found.config == CONFIG["config"]
    assert found.unsupported == {"a step": "no kernel"}


@pytest.mark.parametrize(
    "line",
    [
        {"row": 3}, {"row": []}, {"row": {}}, {"row": {**ROW, "median": None}}, {"row": {**ROW, "q1": "1"}},
        {"row": {**ROW, "median": 0.0}}, {"row": {**ROW, "median": -1.0}}, {"row": {**ROW, "q3": 1e300}},
        {"row": {**ROW, "to_yardstick": float("nan")}}, {"row": {**ROW, "to_reference": True}},
        {"config": None}, {"config": {}}, {"config": {**CONFIG["config"], "device": ["x"]}}, {"unsupported": 5},
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_meant_is_one_line(line):
    with pytest.raises(ValueError, match=r"^its process gave an answer that cannot be meant while it was tried$"):
        read_pass([CONFIG, PHASE, line], "")


def test_figures_without_what_they_are_of_or_given_twice_are_refused():
    with pytest.raises(ValueError, match="did not say what it timed"):
        read_pass([{"row": ROW}, END], "")
    with pytest.raises(ValueError, match="cannot be meant"):
        read_pass([CONFIG, {"row": ROW}, {"row": ROW}], "")


def test_an_answer_that_breaks_off_is_none():
    with pytest.raises(ValueError, match=r"^the process ended without an answer while it was tried$"):
        read_pass([CONFIG, {"row": ROW}, PHASE], "")
    with pytest.raises(ValueError, match=r"^its process timed nothing$"):
        read_pass([PHASE, END], "")


@pytest.mark.parametrize("ended", ["the process ended with code 7", "it gave no answer within 600 s"])
def test_an_answer_that_is_whole_counts_however_the_process_ends(ended):
    assert read_pass([CONFIG, {"row": ROW}, END], ended).rows
    with pytest.raises(ValueError, match=f"^{ended} while it was tried$"):
        read_pass([CONFIG, {"row": ROW}, PHASE], ended)


def test_a_reason_is_never_empty():
    assert read_pass([{"unsupported": {"a step": ""}}, END], "").unsupported == {"a step": "no reason is given"}


def test_how_it_failed_is_short_and_printable():
    with pytest.raises(ValueError, match="x1b") as caught:
        read_pass([{"phase": ["x" * 10**6]}, {"failed": "\x1b[2J" * 10**6}], "the process died")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1300


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"phase": "now"}\n' + b"[" * 10**6, "the process ended now"),
        (b"x" * (1 << 25), "the process ended before it was imported"),
        (b"\xff\xfe\n3\nnull\n", "the process ended before it was imported"),
        (b'{"failed": "no kernel"}\n', "no kernel before it was imported"),
    ],
    ids=["cut short", "endless", "no text", "failed"],
)
def test_what_a_process_leaves_is_read_within_bounds(monkeypatch, answer, said):
    def child(arguments, timeout):
        with open(arguments[-1], "wb") as file:
            file.write(answer)
        return "the process ended"

    monkeypatch.setattr(runs, "run_in_child", child)
    with pytest.raises(PassError, match=f"^NAME: acme cannot be timed: {said}$"):
        measure(Question("acme", "attn-acme 1.0"), 3)


def test_passes_of_other_rows_are_refused(monkeypatch):
    parts = iter(["plan", "build"])

    def child(arguments, timeout):
        row = {**ROW, **dict.fromkeys(FIGURES, 1.0), "part": next(parts), "to_reference": None}
        Path(arguments[-1]).write_text(f"{json.dumps(CONFIG)}\n{json.dumps({'row': row})}\n{json.dumps(END)}\n")
        return ""

    monkeypatch.setattr(runs, "run_in_child", child)
    with pytest.raises(PassError, match="pass 2 has other rows than the first"):
        measure(Question("acme", "attn-acme 1.0"), 3)
