"""What a user gives is quoted in short: an error is one line of a limited length, without control codes."""

import sys

import pytest

from attncore.cli import main

LONG = "x" * 100_000
DIGITS = "9" * 4000
WORDS = [
    [LONG], ["list", LONG], ["list", f"--{LONG}"], ["list", *["yy"] * 9999], ["explain", f"--dtype={LONG}"],
    ["explain", "--dtype", LONG], ["explain", "--num-heads", LONG], ["explain", "--num-heads", DIGITS],
    ["explain", "--num-heads", "9" * 5000], ["explain", "--head-size", DIGITS],
    ["explain", "--logits-soft-cap", DIGITS],
    ["explain", "--tensor-parallel", DIGITS], ["explain", "--assume", LONG], ["explain", "--assume-package", LONG],
    ["explain", "--assume", "\x1b[2J"], ["explain", "--config", LONG], ["explain", "--backend", LONG],
    ["explain", "--prefer", LONG], ["explain", "--exclude", LONG + ",x"], ["explain", "--feature", LONG],
    ["verify", LONG], ["verify", LONG, "--all"], ["verify", "--timeout", DIGITS], ["doctor", "--timeout", "9" * 5000],
    ["bench", LONG], ["bench", "reference", "--passes", DIGITS], ["bench", "reference", "--seconds", "9" * 300 + "x"],
    ["bench", "reference", "--seconds", DIGITS], ["new-backend", LONG, "x"], ["new-backend", "acme", LONG],
    ["build", LONG], ["replay", LONG], ["replay", "--requests", DIGITS], ["replay", "--groups", LONG],
    ["replay", "--clock", LONG], ["replay", "--clock", f"step={LONG}"], ["replay", "--speculative", DIGITS],
    ["replay", "--backend", LONG, "--requests", "1"], ["replay", "--model", LONG],
    ["replay", "--context-parallel", LONG],
]  # fmt: skip
VARIABLES = ("ATTNCORE_BACKEND", "ATTNCORE_PLUGINS", "ATTNCORE_DISABLE_PLUGINS", "ATTNCORE_STRICT_PLUGINS")


def check(words, capsys):
    code = main(words)
    out, err = capsys.readouterr()
    assert code in (2, 3), (out, err)
    assert len(err.splitlines()) == 1
    assert len(err) < 2500
    assert not {letter for letter in out + err if not letter.isprintable() and letter != "\n"}
    return err


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_what_is_given_is_quoted_in_short(words, site, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = check(words, capsys)
    assert "x" * 300 not in err
    assert "9" * 300 not in err


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["X" * 100_000, "x" * 100_000, "a,\x1b[2J", "\u202e"])
def test_variables_are_quoted_in_short(variable, value, site, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    check(["explain"], capsys)


@pytest.mark.parametrize("digits", [0, 10**7])
def test_a_limit_of_digits_that_is_lifted_is_in_force(digits, tmp_path, capsys, monkeypatch):
    """As by PYTHONINTMAXSTRDIGITS: what takes minutes, and no signal ends, is refused. The caller keeps the limit."""
    monkeypatch.chdir(tmp_path)
    line = '{"block_size": ' + "9" * 5000 + "}"
    for name in ("steps.jsonl", "config.json", "trace.jsonl"):
        (tmp_path / name).write_text(line + "\n")
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(digits)
    try:
        for words in (["build", "steps.jsonl"], ["explain", "--config", "config.json"], ["replay", "trace.jsonl"]):
            assert "holds an integer of more than 4300 digits" in check(words, capsys)
        assert sys.get_int_max_str_digits() == digits
    finally:
        sys.set_int_max_str_digits(before)
