"""The site: docs/index.md lists every page once; what docs/site/pages.py makes of a page."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", DOCS / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", [DOCS, DOCS / "design"], ids=lambda folder: folder.name)
def test_an_index_lists_every_page_once(folder, pages):
    listed = [page for page in pages.LINK.findall((folder / "index.md").read_text()) if "/" not in page]
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")


def test_sections_of_links_become_tables_of_contents(pages):
    text = "# T\n\n[x](no.md)\n\n## One\n\n- [A](a.md): a\n- [B](../b.md)\n\n## Two\n\ntext [c](c.md)\n"
    tables = re.findall(r"```{toctree}\n(.*?)```", pages.contents(text, captions=True), re.DOTALL)
    assert tables == [":hidden:\n:caption: One\na.md\n../b.md\n"]


def test_blocks_of_signatures_become_docstrings(pages):
    text = "<!-- api: InputBatch select PAD_SLOT_ID slots -->\n```python\nclass InputBatch\n```\n<!-- end -->"
    made = pages.SIGNATURES.sub(pages.documented, text)
    for directive in (
        "autoclass:: attncore.InputBatch",
        "autofunction:: attncore.select",
        "automodule:: attncore.slots",
    ):
        assert directive in made
    assert "   :value: -1" in made
    assert "class InputBatch" not in made


def test_links_on_the_site(pages):
    text = [
        "[device.md](device.md#steps) [d](docs/design/) [device](device.md) [a.md](https://x.org/a.md) [b.md](c.md)"
    ]
    pages.read(None, "docs/x", text)
    assert text == [
        "[](device.md#steps) [d](docs/design/index.md) [device](device.md) [a.md](https://x.org/a.md) [b.md](c.md)"
    ]
