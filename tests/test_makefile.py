"""What ``make`` says of its targets."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSIDE = {"help", "test-vllm", "test-sglang", "with-rev"}
"""Targets that others run."""


def test_help_has_every_target_and_fits_a_terminal():
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert {line.split()[1] for line in shown.splitlines()} == set(phony.replace("\\\n", "").split()) - INSIDE
    assert max(map(len, shown.splitlines())) <= 80


def test_the_demo_ends_in_lines_that_fit_a_terminal():
    shown = printed("demo", "-o", ".venv/.built")
    said = re.findall(r'^echo "(.*)"$', shown, re.MULTILINE)
    assert said[0] == "next: . .venv/bin/activate; attncore explain; attncore --help"
    assert max(map(len, said)) <= 80


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], ""),
        (["STRICT=1"], " --strict"),
        (["K=TestDecode or select"], ' -- -k "TestDecode or select"'),
        (["K=TestDecode", "BENCH=-x"], ' -- -k "TestDecode" -x'),
    ],
    ids=" ".join,
)
def test_a_part_of_the_benchmarks_is_named_as_for_a_comparison(words, given):
    """K was ignored by `make bench`, which then ran all of them."""
    shown = printed("bench", "-o", ".venv/.built", "-o", ".venv/.bench", *words)
    assert " ".join(shown.split()) == f".venv/bin/python benchmarks/run.py{given}"


def printed(*words):
    """What make would run."""
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
