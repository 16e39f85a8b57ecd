"""docs/adopted-steps.md: its snippets run."""

import pathlib
import re

import torch

from attncore.dense import dense_attention

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "adopted-steps.md").read_text()


def run(page):
    """What the page's snippets leave behind, run from top to bottom."""
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(snippet, "docs/adopted-steps.md", "exec"), names)
    return names


def test_the_snippets_run_from_top_to_bottom():
    names = run(PAGE)
    metadata, output = names["metadata"], names["output"]
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    prompt = dense_attention(*(names[name][2:] for name in ("query", "key", "value")), scale=0.25)
    torch.testing.assert_close(output[2:], prompt)
