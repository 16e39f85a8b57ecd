"""Prose of the documents is at most 120 columns wide."""

import prose
import pytest


@pytest.mark.parametrize("file", list(prose.documents()), ids=lambda file: str(file.relative_to(prose.ROOT)))
def test_prose_is_not_too_wide(file):
    lines = file.read_text(encoding="utf-8").split("\n")
    wide = [f"line {start + 1}: {lines[start][:60]}" for start, end in prose.too_wide(lines)]
    assert not wide, "python tests/prose.py --write fills them"


def test_paragraphs_alone_are_filled():
    word, line = "word ", "word " * 30
    text = [
        f"- {line}", "  behind", "", f"1. {line}", line, "", "```", line, "```", f"    {line}", f"| {line} |",
        f"# {line}", "x" * 130, "- short",
    ]  # fmt: skip
    made = prose.filled(text)
    assert [at for at, _ in prose.too_wide(text)] == [0, 3]
    assert made[0].startswith(f"- {word}")
    assert made[1].startswith(f"  {word}")
    assert made[1].endswith("behind")
    assert made[-8:] == text[-8:]
    assert not list(prose.too_wide(made))
    assert " ".join(made).split() == " ".join(text).split()
