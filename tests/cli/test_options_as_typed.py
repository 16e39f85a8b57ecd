"""An error names what was typed: the option, and not the argument of the library that it states."""

import json
from argparse import Namespace

import pytest

from attncore.cli import COMMANDS, _parser, main
from attncore.command import UsageError
from attncore.quoted import quoted

MISTAKES = {
    "replay --metadata-only --num-blocks 2": "--num-blocks: row 1 of the trace",
    "replay --metadata-only --speculative 3:2": "--speculative: ACCEPT 2 is not between 0 and 1",
    "replay --metadata-only --speculative 3:x": "--speculative: ACCEPT 'x' is not a number",
    "replay --metadata-only --speculative x:1": "--speculative: K 'x' is not a whole number",
    "replay --model absent": "--model: absent cannot be read",
    "verify --num-heads 3 --num-kv-heads 2": "--num-kv-heads: 2 does not divide --num-heads 3",
    "replay --metadata-only --num-heads 3": "--num-heads: 3 is no multiple of --num-kv-heads, by default 2; give both",
    "replay --metadata-only --num-heads 4 --num-kv-heads 3": "--num-kv-heads: 3 does not divide --num-heads 4",
    "replay --model org/model": "--model: org/model cannot be read: No such file or directory; nothing is downloaded:",
    "explain --config gpt2": "--config: gpt2 cannot be read: No such file or directory; nothing is downloaded: give a",
    "verify --head-size 0": "--head-size: 0 is below 1",
    "explain --num-heads 3 --num-kv-heads 2": "--num-kv-heads: 2 does not divide --num-heads 3",
    "explain --config absent": "--config: absent cannot be read",
    "explain --num-kv-heads 5": "--num-kv-heads: 5 does not divide --num-heads 32",
    "explain --assume foo": "--assume: 'foo' is not a device",
    "explain --assume h100": "--assume: 'h100' is not a device; write cuda:sm_90, sm_90, rocm:gfx942,",
    "explain --prefer Flash": "--prefer: 'Flash'",
    "explain --max-model-len 0": "--max-model-len: 0 is below 1",
    "explain --logits-soft-cap nan": "--logits-soft-cap: nan is not a positive number",
    "bench reference --device foo": "--device: 'foo' cannot be used here: torch has no such device; give one that this",
    "bench reference --device mkldnn": "--device: 'mkldnn' cannot be used here: torch has no such device; give one",
    "bench reference --device cuda:99": "--device: 'cuda:99' cannot be used here: ",
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
        parser.in_words_of_options(error, Namespace(**{action.dest: 3}))
        assert str(error) == f"{action.option_strings[-1]}: 3 is wrong"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_no_option_s_name(command, capsys):
    assert main([command, "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith("-")] == []


@pytest.mark.parametrize("name", ["seed", "trace", "num_blocks"])
def test_a_file_that_is_called_as_an_option_is_a_file(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00.0,x,2\n")
    assert main(["replay", "--metadata-only", name]) == 2
    assert capsys.readouterr().err.startswith(f"attncore: error: {name}: row 1 (line 2): ContextTokens: 'x'")


@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ({"sliding_window": 0}, "", "--config: c.json: sliding_window: 0 is not a positive integer"),
        ({"head_dim": 0}, "", "--config: c.json: head_dim: 0 is not a positive integer"),
        ({"torch_dtype": "int3"}, "", "--config: c.json: torch_dtype: 'int3' is not one of"),
        (
            {"num_key_value_heads": 3},
            "",
            "--config: c.json: num_key_value_heads: 3 does not divide num_attention_heads 8",
        ),
        ({"attn_logit_softcapping": "x"}, "", "--config: c.json: attn_logit_softcapping: 'x' is not a positive"),
        ({}, "--num-kv-heads 3", "--num-kv-heads: 3 does not divide num_attention_heads 8"),
        ({}, "--tensor-parallel 3", "--tensor-parallel: 3 does not divide the model's number of heads, 8"),
    ],
)
def test_what_a_configuration_states_is_named_as_its_own(fields, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps({"num_attention_heads": 8, "hidden_size": 512, **fields}))
    assert main(["explain", "--config", "c.json", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"attncore: error: {said}")


@pytest.mark.parametrize(
    "words",
    ["replay --save-steps", "replay --html", "replay", "replay --trace", "replay --model", "replay --backend",
     "explain --config", "bench reference --steps", "build", "new-backend acme", "verify"],
)  # fmt: skip
def test_an_empty_name_is_refused(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), ""]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.endswith(": '' is empty; give a value\n")) == ("", 1, True)
    assert main([*words.split()[:1], "--device="]) == 2  # of an option that is none, too


def test_what_is_no_argument_stays_as_it_is():
    parser = _parser("explain")
    given = Namespace(num_heads=3, num_kv_heads=2)
    error = UsageError("num_heads: row 1 of a file of that name")
    parser.in_words_of_options(error, given)
    assert str(error).startswith("num_heads: row 1")
    error = ValueError("head_size: 3 of a file, no option")
    parser.in_words_of_options(error, given)
    assert str(error).startswith("head_size: 3")
    for text in ("ATTNCORE_BACKEND: x", "line 3: num_heads: 0", "/num_heads: absent", "no colon"):
        error = ValueError(text)
        parser.in_words_of_options(error, given)
        assert str(error) == text
    error = ValueError("num_heads: 3, of num_heads.json and 'num_heads'; lower num_kv_heads")
    parser.in_words_of_options(error, given)
    assert str(error) == "--num-heads: 3, of num_heads.json and 'num_heads'; lower --num-kv-heads"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["replay", "--dtype", "x"], "; attncore replay --help lists the options"),
        (["replay", "--head-sze", "3"], "; did you mean --head-size?"),
        (["explain", "--dtpye", "x"], "; did you mean --dtype?"),
        (["bench", "--jsn"], "; did you mean --json?"),  # which lacks NAME, too
        (["explain", "--device", "sm_90"], "; attncore explain has --assume DEVICE for that"),
        (["explain", "--model=m"], "; attncore explain has --config FILE for that"),
        (["replay", "--config", "m"], "; attncore replay has --model DIR for that"),
        (["verify", "--backend", "reference"], "; attncore verify has the argument NAME for that"),
        (["bench", "--backend", "reference"], "; attncore bench has the argument NAME for that"),
        (["show", "--backend=reference"], "; attncore show has the argument NAME for that"),
    ],
)
def test_a_misspelt_option_is_guessed_only_where_one_is_close(words, hint, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"attncore: error: unrecognized arguments: {words[1]}")
    assert err.endswith(f"{hint}\n")


@pytest.mark.parametrize("word", ["", " ", "\n\t", "\x1c", "\u2028", "\u200b", "\x00"])
@pytest.mark.parametrize("command", ["list", "doctor", "build -", "show reference", "explain", "verify reference"])
def test_a_word_of_nothing_but_blanks_is_quoted(command, word, capsys):
    """Such as that of a variable of the shell that is not set, as in ``attncore list "$OPTIONS"``."""
    assert main([*command.split(), word]) == 2
    err = capsys.readouterr().err
    assert err.startswith("attncore: error: unrecognized arguments: ")
    assert err.count("\n") == 1
    assert quoted(word).strip("'") in err
