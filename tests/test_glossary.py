"""docs/glossary.md defines each term of our own once; words that it replaces occur nowhere."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "glossary.md").read_text()
TERMS = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)

SCOPE = (
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "attncore/**/*", "plugins/*/src/**/*",
    "plugins/*/README.md",
)  # fmt: skip

SUFFIXES = {".md", ".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h", ".txt", ".toml"}
DENIED = (
    "door", "doors", "road", "roads", "null step", "null steps", "step of nobody", "steps of nobody", "nobody",
    "everybody", "StepBucket", "BatchRows", "BlockRows", "last_blocks", "build_null", "why_staging", "as they come",
    "for memory's sake",
)  # fmt: skip
ALLOWED = {  # "a backend that nobody provides"
    "attncore/vocabulary.py": ("nobody",),
    "docs/contract.md": ("nobody",),
}
"""Path -> denied words that it may have, in an ordinary sense."""


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def entries():
    """Term -> the text of its entry."""
    return {block.split("\n", 1)[0]: block.split("\n", 1)[1].strip() for block in PAGE.split("\n### ")[1:]}


def test_terms_stand_in_alphabetical_order_and_once():
    assert sorted(TERMS, key=str.lower) == TERMS
    assert len({anchor(term) for term in TERMS}) == len(TERMS)


def test_an_entry_is_a_definition_of_up_to_three_sentences_and_a_link():
    for term, text in entries().items():
        definition, where = text.split("\n\n")
        assert 1 <= len(re.findall(r"\.(?=\s|$)", definition)) <= 3, term
        assert re.search(r"\]\([\w/#.-]+\)\.$", where), term


def test_terms_that_the_issue_names_are_there():
    wanted = {
        "arena", "journal", "receipt", "ticket", "poison", "null block", "captured size", "bucket",
        "empty step", "transport", "persistent builder", "list builder", "dialect", "plan", "plan key",
        "KV-cache group", "manager block", "kernel block", "virtual block", "twin", "variant", "light module",
    }  # fmt: skip
    assert wanted <= set(TERMS)


def test_denied_words_do_not_occur():
    words = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in DENIED)
    pattern = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    found = []
    for path in sorted({path for glob in SCOPE for path in ROOT.glob(glob)}):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for match in pattern.finditer(text):
            if match[1].lower() not in ALLOWED.get(name, ()):
                found.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]}")
    assert not found, "\n".join(found)
