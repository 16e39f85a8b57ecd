"""One wording of a mistake whatever the command."""

import pytest

from attncore.cli import main


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("explain --num-heads abc", "--num-heads: 'abc' is not a whole number"),
        ("verify reference --timeout x", "--timeout: 'x' is not a number"),
        ("doctor --timeout x", "--timeout: 'x' is not a number"),
        ("replay --requests x", "--requests: 'x' is not a whole number"),
        ("bench", "NAME: none given; "),
        ("show", "NAME: none given; "),
        ("new-backend", "NAME, DIR: none given; "),
        (
            "explain --dtype fp16",
            "--dtype: invalid choice: 'fp16' (choose from 'float16', 'bfloat16', 'float32'); did ",
        ),
    ],
)
def test_a_mistake(words, text, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"attncore: error: {text}")


def test_an_example_in_help_keeps_its_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["build", "--help"]) == 0
    assert """[{"is_prompt": true, "sequences": [' \\\n      '{"seq_id": 0""" in capsys.readouterr().out
