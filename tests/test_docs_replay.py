"""docs/replay.md: the line that its snippet writes is a step that `attncore build` and `attncore bench` read."""

import json
import pathlib
import re

from attncore.testing.engines.saved_steps import read_steps

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "replay.md").read_text()


def test_a_recorded_step_is_one_of_saved_steps(tmp_path):
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/replay.md", "exec"), names)
    file = tmp_path / "steps.jsonl"
    file.write_text(names["line"])
    (batch,) = read_steps(file).batches
    assert batch.block_size == 4
    prompt, decode = (group["sequences"][0] for group in json.loads(names["line"])["groups"])
    assert (prompt["query_len"], prompt["context_len"], prompt["block_table"]) == (5, 0, [4, 6])
    assert (decode["query_len"], decode["context_len"], decode["block_table"]) == (1, 5, [1, 2])
