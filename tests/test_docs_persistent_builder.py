"""docs/persistent-builder.md: its snippets run."""

import pathlib
import re

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "persistent-builder.md").read_text()


def test_the_snippets_run_from_top_to_bottom():
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/persistent-builder.md", "exec"), names)
    assert {"spoken", "drafting", "rank"} <= names.keys()
