"""docs/troubleshooting.md: every message that it quotes is one of the code."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)


@functools.cache
def messages():
    """Every text of the code, with ``…`` where a value goes."""
    files = [ROOT / "setup.py", *(ROOT / "attncore").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    return {text(node) for file in files for node in ast.walk(ast.parse(file.read_text())) if texts(node)}


def texts(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def text(node):
    parts = [node] if isinstance(node, ast.Constant) else node.values
    return "".join(part.value if isinstance(part, ast.Constant) else shown(part.value) for part in parts)


def shown(value):
    """What stands for a value: ``…``, and ``… blocks`` for ``counted(number, 'block')``."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "counted"):
        return "…"
    words = [argument.value for argument in value.args[1:] if isinstance(argument, ast.Constant)]
    return f"… {words[1] if len(words) > 1 else f'{words[0]}s'}" if words else "…"


def found(quoted, among):
    """Whether the fixed parts of ``quoted`` stand in this order in one of ``among``, the first at its beginning."""
    pattern = re.compile(".*".join(re.escape(part) for part in re.split("…", quoted)), re.DOTALL)
    return any(pattern.match(one.lstrip()) for one in among)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_in_the_code(quoted):
    assert len(quoted.replace("…", "").strip()) >= 15, "it would fit any text"
    assert found(quoted, messages())


def test_a_changed_message_is_seen():
    assert found("cache: … blocks found", {"cache: … blocks found; give …"})
    assert not found("cache: … blocks found", {"cache: … block found; give …", "the cache: … blocks found"})
    assert len(QUOTED) > 25
