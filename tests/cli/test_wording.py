"""One wording of a mistake whatever the command."""

import json

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


def test_the_example_in_help_is_a_line_that_is_answered(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["build", "--help"]) == 0
    line = next(part for part in capsys.readouterr().out.split("\n\n") if part.startswith("{"))
    (tmp_path / "lines.jsonl").write_text(line.replace("\n", " ") + "\n")
    assert main(["build", str(tmp_path / "lines.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["seq_lens"] == [5]
