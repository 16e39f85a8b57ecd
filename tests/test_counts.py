"""Numbers in messages: ``counted`` writes "1 block" and "2 blocks", where f"{n} blocks" would write "1 blocks"."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from attncore.show import counted

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("attncore", "plugins", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if not {"template", "tests", "build"} & set(path.parts) and not any(part.startswith(".") for part in path.parts)
)
COUNTED = re.compile(
    r" (?:(?:query|encoder|computed|padded|kernel|page|system) )?"
    r"(?:tokens|blocks|requests|rows|slots|layers|pages|columns|sequences|heads|groups|steps|caches|lengths|elements"
    r"|chunks|ranks|cores|packages|prefills|decodes|values|results)\b"
    r"(?! exceed| in this step exceed|, and a step of this arena)"
)
"""What follows a number that may be one; what exceeds a limit is more than one."""

SEVERAL = {
    "_MOST_BLOCKS", "_MOST_CHUNKS", "_MOST_LENS", "MAX_REQUESTS", "ARRIVALS_PER_SECOND", "PROMPT_MEDIAN",
    "SYSTEM_PROMPTS", "HASH_BLOCK", "HEADS", "each", "group", "ranks", "width",
}  # fmt: skip
"""Constants and names that are above one where they are printed."""

NO_NUMBERS = {"layer_type", "counts.tolist()", "', '.join(map(str, sizes))", "columns", "kind", "blocks"}
"""Names of kinds, lists, and a side of a table ("2 x 1 blocks")."""


def plurals(source: str) -> list[str]:
    """The expressions of f-strings in ``source`` behind which a plural stands as text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, text in pairwise(parts):
            if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                continue
            word, expression = COUNTED.match(str(text.value)), ast.unparse(value.value)
            if word and value.conversion == -1 and expression not in SEVERAL | NO_NUMBERS:
                found.append(f"line {node.lineno}: {{{expression}}}{word.group()}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_number_and_its_noun_agree(path):
    assert plurals(path.read_text()) == [], "write {counted(number, 'block')}, or word it without a plural"


def test_the_search_finds_a_plural():
    assert plurals('f"{n} blocks and {m:,} query heads of {who!r} tokens"') == [
        "line 1: {n} blocks",
        "line 1: {m} query heads",
    ]
    assert plurals('f"{n} tokens exceed {MOST} of {size} in {name}"') == []


def test_counted():
    assert [counted(0, "token"), counted(1, "token"), counted(2, "query", "queries")] == [
        "0 tokens",
        "1 token",
        "2 queries",
    ]
    assert counted(1000, "step", spec=",") == "1,000 steps"
