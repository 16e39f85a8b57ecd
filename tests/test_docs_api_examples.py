"""docs/api-examples.md has an example for every public name, and each runs."""

import inspect
import pathlib
import re

import pytest

import attncore
from attncore import slots

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "api-examples.md").read_text()
SETUP = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
EXAMPLES = re.findall(r"^### (\S+)\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)

OBJECTS = {
    "AttentionImpl": "impl", "BackendConfig": "config", "Choice": "choice", "JointChoice": "joint",
    "LayersChoice": "choices", "Reason": "reason",
}  # fmt: skip
"""What an example calls its object of a class that it does not name."""


def test_every_public_name_has_one_example():
    functions = {name for name in slots.__all__ if inspect.isfunction(getattr(slots, name))}
    assert sorted(name for name, _ in EXAMPLES) == sorted({*attncore.__all__} | functions)


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_runs(name, code, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    names = {}
    exec(SETUP, names)
    exec(compile(code, f"docs/api-examples.md, {name}", "exec"), names)
    assert re.search(rf"\b{OBJECTS.get(name, name)}\b", code)
