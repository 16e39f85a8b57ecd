"""docs/port-from-v0.md: its right column runs, and its left one has the names that the first generation has."""

import ast
import pathlib
import re

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "port-from-v0.md").read_text()


def test_the_right_column_runs_from_top_to_bottom():
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/port-from-v0.md", "exec"), names)
    assert names["metadata"].is_all_encoder_attn_metadata_set


def test_the_columns_are_pairs_of_python():
    before, after = (re.findall(rf"```{mark}\n(.*?)```", PAGE, re.DOTALL) for mark in ("py", "python"))
    assert len(before) == len(after) > 5
    for snippet in before:
        ast.parse(snippet)
