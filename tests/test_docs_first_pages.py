"""docs/first-steps.md runs; docs/gpu-quickstart.md says what the command prints and what the committed runs have."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import attncore

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
QUICKSTART = (ROOT / "docs" / "gpu-quickstart.md").read_text()


def test_the_first_steps_run(monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    cpu = attncore.Host.assume("cpu")
    monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: cpu))
    page, names = (ROOT / "docs" / "first-steps.md").read_text(), {}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(snippet, "docs/first-steps.md", "exec"), names)
    printed, *_ = capsys.readouterr().out.splitlines()
    assert f"# {printed}" in page
    assert names["choice"].name == "reference"
    assert len(names["free"]) == 99 - 2  # what b holds: 26 tokens


@pytest.mark.parametrize("page", ["gpu-quickstart.md", "capabilities.md"])
def test_the_choice_is_what_explain_prints(page):
    text = (ROOT / "docs" / page).read_text()
    shown = re.search(r"<!-- explain -->\n    \$ attncore ([^\n]*)\n(.*?)<!-- end -->", text, re.DOTALL)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ATTNCORE_")}
    words = [sys.executable, "-m", "attncore", *shown[1].split()]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    if missing := {"flash", "flashinfer", "rocm"} - {*re.findall(r"^(\w+) \(", done.stdout, re.MULTILINE)}:
        pytest.skip(f"the page is about plugins that are not installed here: {', '.join(sorted(missing))}")
    said = re.sub(r" \([^)]*\)", "", done.stdout).splitlines()
    assert [line.strip() for line in shown[2].splitlines() if line.strip()] == [
        line for line in said if re.match(r"\w+: .*chosen", line)
    ]


def test_the_verdicts_are_those_of_the_committed_run():
    verdicts = json.loads((RESULTS / "flash_verify_20261121.json").read_text())["verdicts"]
    for verdict in verdicts:
        variant = "fa4" if "flash-attn-4" in verdict["library"] else "fa2"
        row = ("flash", variant, verdict["device"], verdict["state"])
        assert f"| {' | '.join(row)} | {verdict['max_abs_error']:.2g} | {verdict['seconds']:.1f} |" in QUICKSTART


@pytest.mark.parametrize("rows", [64, 256])
def test_the_served_steps_are_those_of_the_committed_run(rows):
    runs = json.loads((RESULTS / "served_step_20261123.json").read_text())["rows"]
    medians = {
        run["backend"]: run["attncore_us"]["median"]
        for run in runs
        if (run["model"], run["kind"], run["rows"], run["transport"]) == ("standin", "decode", rows, "graph")
    }
    assert f"| {rows} | {medians['flash']:.1f} | {medians['flashinfer']:.1f} |" in QUICKSTART
