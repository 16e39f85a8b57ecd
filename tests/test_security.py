"""SECURITY.md: every promise names tests, which run in make test; what attncore never does stands in no module."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (`.+`) \|$", PAGE, re.MULTILINE)
NAMED = [name for _, cell in ROWS for name in re.findall(r"`([^`]+)`", cell)]
MODULES = sorted((ROOT / "attncore").rglob("*.py"))
CONNECTIONS = {
    "aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "imaplib", "poplib", "requests", "smtplib", "socket",
    "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "websockets", "xmlrpc",
}  # fmt: skip
EVALUATE = {"eval", "exec", "compile", "__import__"}
# numba keeps its compiled functions as pickles, which are read only where they are the user's own.
KEPT = ("attncore/kernels/numba/jit.py", "pickle")
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}


def test_every_promise_has_a_test():
    assert len(ROWS) > 20
    assert all("::" in name for name in NAMED)


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_named_tests_exist(name):
    path, _, test = name.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    assert test in functions | assigned, f"{path} has no {test}"


def test_named_tests_are_collected():
    """None of them is deselected, skipped as a whole, or out of pytest's sight."""
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
    run = subprocess.run(
        [sys.executable, *words, *(f"tests/{name}" for name in sorted(set(NAMED)))],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    collected = {re.sub(r"\[.*", "", line) for line in run.stdout.splitlines() if line.startswith("tests/")}
    missing = [name for name in NAMED if not any(one.startswith(f"tests/{name}") for one in collected)]
    assert missing == []


def nodes(kind):
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield path.relative_to(ROOT).as_posix(), node


def imported():
    """(file, the first name of a module that it imports), anywhere in it."""
    for path, node in nodes((ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        yield from ((path, name.partition(".")[0]) for name in names)


def test_no_module_opens_a_connection():
    found = set(imported())
    assert ("attncore/json_lines/json_fields.py", "json") in found
    found.remove(("attncore/replay/layers/model_from_config.py", "huggingface_hub"))  # its switch that sets it offline
    found.remove(("attncore/how_to_install.py", "urllib"))  # urllib.parse: a path out of a file's URL
    assert [one for one in found if one[1] in CONNECTIONS] == []


def test_no_module_evaluates_what_it_reads():
    """Neither eval and its like, nor a format of files that can hold code; torch.load only of weights."""
    called = [(path, node.func.id) for path, node in nodes(ast.Call) if isinstance(node.func, ast.Name)]
    assert ("attncore/json_lines/json_fields.py", "isinstance") in called
    assert [one for one in called if one[1] in EVALUATE] == []
    assert [one for one in imported() if one[1] in LOADERS and one != KEPT] == []
    loads = [
        (path, node) for path, node in nodes(ast.Attribute) if node.attr == "load" and isinstance(node.value, ast.Name)
    ]
    assert [path for path, node in loads if node.value.id == "torch"] == []
