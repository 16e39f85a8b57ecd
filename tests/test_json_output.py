"""JSON that is printed or written is JSON: no NaN, and on standard output nothing beside it."""

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planting import HEAVY, SPEC, site

from attncore import Option
from attncore.json_output import json_text, only_json, print_json

__all__ = ["site"]
ROOT = Path(__file__).parents[1]
OURS = {"attncore/json_output.py", "attncore/quoted.py"}
"""Who may call ``json.dumps``: the function that the others call, and what quotes a value of a message."""


def strict(text):
    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(number, capsys):
    value = {"a": [1.5, number], "b": {"c": (number, True, "NaN")}, "d": number}
    shown = {"a": [1.5, None], "b": {"c": [None, True, "NaN"]}, "d": None}
    assert strict(json_text(value)) == shown
    print_json(value)
    assert strict(capsys.readouterr().out) == shown
    assert value["d"] is number


def test_options_are_those_of_json():
    assert json_text([1, "é"], separators=(",", ":"), ensure_ascii=False) == '[1,"é"]'
    assert json_text({"b": math.nan, "a": 1}, sort_keys=True) == '{"a": 1, "b": null}'


def calls_of_json(file):
    """The calls of json.dump and json.dumps in a module that may write NaN."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("dump", "dumps"):
            of_json = isinstance(node.func.value, ast.Name) and node.func.value.id == "json"
            if of_json and not any(one.arg == "allow_nan" for one in node.keywords):
                yield f"{file.relative_to(ROOT)}:{node.lineno}"


def test_nothing_else_writes_json():
    files = [*ROOT.glob("attncore/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert len(files) > 200
    found = [call for file in files if str(file.relative_to(ROOT)) not in OURS for call in calls_of_json(file)]
    assert found == [], "call attncore.json_output.json_text, or json.dumps with allow_nan=False"
    assert list(calls_of_json(ROOT / "attncore" / "quoted.py"))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_option_is_a_finite_number(number):
    for given in ({"default": number}, {"choices": (1.0, number)}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}: (nan|inf) is not a finite number"):
            Option(float, "a factor", **given)
    assert Option(float, "a factor").problem(number) == "is not a finite number"
    assert Option(float, "a factor").problem(10**400) is None
    assert Option(float, "a factor").problem(2.5) is None


def test_standard_output_is_the_programs_again(capsys):
    before = sys.stdout
    with only_json(True, to_the_end=False):
        print("beside")
        print_json([1])
    assert sys.stdout is before
    print("after")
    assert capsys.readouterr() == ("[\n  1\n]\nafter\n", "beside\n")


def test_what_is_printed_after_the_end_is_beside_it():
    program = (
        "from attncore.json_output import only_json, print_json\n"
        "with only_json(True, to_the_end=True): print_json([1])\n"
        "print('late')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert (done.stdout, done.stderr) == ("[\n  1\n]\n", "late\n")


THREAD = """
import sys, threading, time
def shout():
    while True:
        print("noise", flush=True)
        time.sleep(1e-5)
sys.setswitchinterval(1e-6)
threading.Thread(target=shout, daemon=True).start()
"""


@pytest.mark.parametrize(
    "words",
    [["attncore", "list"], ["attncore", "explain"], ["attncore.testing", "shouts", "-k", "test_the_plugin_loads"]],
    ids=["list", "explain", "kit"],
)
def test_a_thread_that_prints_without_end_is_beside_it(site, words):
    """The command ends before its thread does."""
    site.plugin("shouts", THREAD + SPEC.format(name="shouts", module="attn_shouts", extra=""), heavy=HEAVY)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environ["ATTNCORE_PLUGINS"] = "shouts,reference"
    for _ in range(1 if words[0] == "attncore.testing" else 5):
        done = subprocess.run(
            [sys.executable, "-m", *words, "--json"],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=100,
        )  # fmt: skip
        strict(done.stdout)
