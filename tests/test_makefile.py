"""What ``make`` says of its targets."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSIDE = {"help", "test-vllm", "test-sglang", "with-rev"}
"""Targets that others run."""


def test_help_has_every_target_and_fits_a_terminal():
    shown = said_by_make("-s", "help")
    phony = re.search(r"^\.PHONY: (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert {line.split()[1] for line in shown.splitlines()} == set(phony.replace("\\\n", "").split()) - INSIDE
    assert max(map(len, shown.splitlines())) <= 80


def test_the_demo_ends_in_lines_that_fit_a_terminal():
    shown = said_by_make("-n", "demo", "-o", ".venv/.built")
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
    shown = said_by_make("-n", "bench", "-o", ".venv/.built", "-o", ".venv/.bench", *words)
    assert " ".join(shown.split()) == f".venv/bin/python benchmarks/run.py{given}"


def test_an_environment_that_venv_did_not_finish_is_made_again(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert "python3 -m venv .venv\n" in run_make("-n", ".venv/bin/activate", cwd=tmp_path).stdout


def test_of_an_environment_that_was_made_elsewhere_it_is_said_what_to_do(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    assert "was moved since: run make clean, then make demo" in run_make("-n", "demo", cwd=tmp_path).stderr
    assert "rm -rf .venv " in run_make("-n", "clean", cwd=tmp_path).stdout


def test_a_checkout_whose_path_has_a_blank_is_one_path(tmp_path):
    """`rm -rf` of the two words removed the folder that the first one is."""
    beside, checkout = tmp_path / "attncore", tmp_path / "attncore 2"
    for folder in (beside, checkout / "requirements", checkout / ".venv/bin"):
        folder.mkdir(parents=True)
    (checkout / "Makefile").write_text((ROOT / "Makefile").read_text())
    (beside / "kept").touch()
    pip = checkout / ".venv/bin/pip"
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    for name in ("requirements/sources.txt", ".venv/bin/activate", ".venv/.test"):
        (checkout / name).touch()
    done = run_make(".venv/.sources", "-o", ".venv/.test", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert (beside / "kept").exists()
    assert (checkout / ".venv/sources/4").is_dir()
    assert "$(CURDIR)" not in (ROOT / "Makefile").read_text(), "the shell would take it for several words"


def said_by_make(*words):
    """Standard output of make."""
    done = run_make(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_make(*words, cwd=ROOT):
    """make, as where no other make has started it."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
