"""CONTRIBUTING.md and docs/design/ name paths that exist; the picture of the tree fits a terminal."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = ("CONTRIBUTING.md", *(f"docs/design/{page.name}" for page in sorted((ROOT / "docs" / "design").glob("*.md"))))
PATH = re.compile(r"\.?[\w.*-]+(/[\w.*-]+)*/?")
SUFFIX = re.compile(r"\.(py|pyi|pyx|pxd|pxi|h|md|sh|txt|toml|json)$")


def paths(text):
    """What stands in backticks and looks like a path."""
    for name in re.findall(r"`([^`\s]+)", text):
        if PATH.fullmatch(name) and ("/" in name or SUFFIX.search(name)):
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    missing = [name for name in paths((ROOT / page).read_text()) if not list(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def test_paths_are_found():
    assert set(paths("`a/b.py` `setup.py` `make test` `docs/` `metadata.step` `x`")) == {"a/b.py", "setup.py", "docs/"}
    assert "attncore/kernels/codes.py" in set(paths(CONTRIBUTING))


def test_the_picture_of_the_tree_is_readable_at_80_columns():
    picture = [line for line in CONTRIBUTING.splitlines() if line.startswith("    ")]
    assert len(picture) > 20
    assert max(map(len, picture)) <= 80


def test_questions_are_answered_with_a_test():
    answers = re.split(r"^\*\*\.\.\. .*?\?\*\*", CONTRIBUTING.partition("\n## Rules")[0], flags=re.MULTILINE)[1:]
    assert len(answers) >= 10
    for answer in answers:
        assert "Held" in answer
        assert any("test" in name or "golden" in name for name in paths(answer))


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if not page.endswith("/index.md")])
def test_a_page_of_design_begins_with_its_decision(page):
    _, first, *_ = (ROOT / page).read_text().split("\n\n")
    assert first.startswith("*Decision.* "), page
