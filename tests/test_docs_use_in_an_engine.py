"""docs/use-in-an-engine.md: its snippets run, and its links lead somewhere."""

import pathlib
import re

import pytest

import attncore

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "use-in-an-engine.md").read_text()


def test_the_snippets_run_from_top_to_bottom(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    cpu = attncore.Host.assume("cpu")  # they have to run where there is a GPU, too
    monkeypatch.setattr("attncore.registry.host.Host.probe", classmethod(lambda cls: cpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/use-in-an-engine.md", "exec"), names)
    assert names["choice"].name == "reference"
    assert names["logits"].shape == (1, 100)


def test_links_lead_somewhere():
    for target, _, anchor in re.findall(r"\]\(([^)#]+)(#([^)]+))?\)", PAGE):
        page = (DOCS / target).read_text()
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings], anchor
