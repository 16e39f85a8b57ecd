"""An error names what was typed: the option, and not the argument of the library that it states."""

import pytest

from attncore.cli import COMMANDS, _parser, main

MISTAKES = {
    "replay --metadata-only --num-blocks 2": "--num-blocks: row 1 of the trace",
    "replay --metadata-only --speculative 3:2": "--speculative: ACCEPT 2 is not between 0 and 1",
    "replay --metadata-only --speculative 3:x": "--speculative: ACCEPT 'x' is not a number",
    "replay --metadata-only --speculative x:1": "--speculative: K 'x' is not a whole number",
    "replay --model absent": "--model: absent cannot be read",
    "verify --num-heads 3 --num-kv-heads 2": "--num-kv-heads: 2 does not divide --num-heads 3",
    "verify --head-size 0": "--head-size: 0 is below 1",
    "explain --num-heads 3 --num-kv-heads 2": "--num-kv-heads: 2 does not divide --num-heads 3",
    "explain --config absent": "--config: absent cannot be read",
    "explain --assume foo": "--assume: 'foo' is not a device",
    "explain --prefer Flash": "--prefer: 'Flash'",
    "explain --max-model-len 0": "--max-model-len: 0 is below 1",
    "explain --logits-soft-cap nan": "--logits-soft-cap: nan is not a positive number",
    "bench reference --device foo": "--device: 'foo' cannot be used here",
    "bench reference --seconds 0.01 --strict": "--strict: --seconds 0.01 is too short to compare runs",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_names_the_option(line, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference")
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"attncore: error: {MISTAKES[line]}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_named_for_the_argument_that_it_states(command):
    parser = _parser(command)
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        error = ValueError(f"{action.dest}: 3 is wrong")
        parser.in_words_of_options(error)
        assert str(error) == f"{action.option_strings[-1]}: 3 is wrong"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_no_option_s_name(command, capsys):
    assert main([command, "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith("-")] == []


def test_what_is_no_argument_stays_as_it_is():
    parser = _parser("explain")
    for text in ("ATTNCORE_BACKEND: x", "line 3: num_heads: 0", "/num_heads: absent", "no colon"):
        error = ValueError(text)
        parser.in_words_of_options(error)
        assert str(error) == text
    error = ValueError("num_heads: 3, of num_heads.json and 'num_heads'; lower num_kv_heads")
    parser.in_words_of_options(error)
    assert str(error) == "--num-heads: 3, of num_heads.json and 'num_heads'; lower --num-kv-heads"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["replay", "--dtype", "x"], "; attncore replay --help lists the options"),
        (["replay", "--head-sze", "3"], "; did you mean --head-size?"),
        (["explain", "--dtpye", "x"], "; did you mean --dtype?"),
        (["bench", "--jsn"], "; did you mean --json?"),  # which lacks NAME, too
    ],
)
def test_a_misspelt_option_is_guessed_only_where_one_is_close(words, hint, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"attncore: error: unrecognized arguments: {words[1]}")
    assert err.endswith(f"{hint}\n")
