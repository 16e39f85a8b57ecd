"""What ``make`` says of its targets."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSIDE = {"help", "test-vllm", "test-sglang", "with-rev"}
"""Targets that others run."""


def test_help_has_every_target_and_fits_a_terminal():
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert {line.split()[1] for line in shown.splitlines()} == set(phony.replace("\\\n", "").split()) - INSIDE
    assert max(map(len, shown.splitlines())) <= 80
