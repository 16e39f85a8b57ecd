"""What the command lines of the examples say of themselves and of mistakes: short, and without a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words, without=None, tmp_path=None):
    """A finished process of an example; ``without`` is a package that cannot be imported there."""
    start = [sys.executable]
    if without:
        (tmp_path / f"{without}.py").write_text(f"raise ModuleNotFoundError('gone', name={without!r})\n")
        program = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]; "
        program += f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
        start += ["-c", program]
    words = [*start, str(EXAMPLES / words[0]), *words[1:]]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("name", ["generate.py", "serve.py", "replicas.py", "ranks.py"])
def test_help_fits_a_terminal_and_needs_no_library(name, tmp_path):
    done = run(name, "--help", without="torch", tmp_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python examples/" in done.stdout or "torchrun" in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "``" not in done.stdout


@pytest.mark.parametrize("name", ["generate.py", "serve.py", "replicas.py", "ranks.py"])
def test_help_fits_a_narrow_terminal_but_for_commands(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = run(name, "--help").stdout.splitlines()
    assert len(lines) > 15
    wide = [line for line in lines if len(line) > 60]
    assert [line for line in wide if not line.startswith(("curl ", "python ", "torchrun ", "usage: torchrun "))] == []
    assert name != "generate.py" or not wide


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve.py", "/nosuch"], "argument MODEL: /nosuch: no such folder"),
        (["generate.py", "a/b/c"], "argument MODEL: a/b/c: no such folder"),
        (["ranks.py", "/nosuch"], "argument MODEL: /nosuch: no such folder"),
        (["ranks.py", "--share-key", "x", "--rank"], "unrecognized arguments: --rank"),
        (["serve.py", "x", "--port", "65536"], "argument --port: 65536: give a number from 0 to 65535"),
        (["replicas.py", "localhost:1", "--port", "-1"], "argument --port: -1: give a number from 0 to 65535"),
        (["ranks.py"], "the following arguments are required: MODEL"),
        (["ranks.py", "x"], "RANK is not set; start every rank by torchrun, as --help shows"),
    ],
)
def test_a_mistake_is_told_at_once(words, said):
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["serve.py", "ranks.py", "generate.py"])
def test_what_is_not_installed_is_one_line(name, tmp_path):
    done = run(name, "x", without="torch", tmp_path=tmp_path)
    assert done.returncode
    assert "torch is not installed: pip install " in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_the_tiny_model_says_fits_a_narrow_terminal():
    done = run("generate.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n    python examples/generate.py MODEL Once upon\n")
    assert [line for line in done.stdout.splitlines() if len(line) > 60] == []


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_file_says_something_when_it_is_run(name):
    done = run(name, "--help")
    assert done.stdout or "is a module; run generate.py beside it" in done.stderr
