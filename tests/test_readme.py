"""The README's engine runs as it stands."""

import pathlib
import re

import pytest
from pictures import plots

import attncore

ROOT = pathlib.Path(__file__).parent.parent


def test_the_engine_of_the_readme_runs(monkeypatch):
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    block, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    cpu = attncore.Host.assume("cpu")  # the example must run where a GPU's plugin is installed, too
    monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: cpu))
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["choice"].name == "reference"
    assert names["metadata"].req_ids == ("b", "a")
    assert names["last"].shape == (2, 32, 128)
    assert names["last"].isfinite().all()
    assert names["batch"].num_computed_tokens("a") == 42
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_first_screen_says_what_it_is_for_whom_and_how_to_try():
    text = (ROOT / "README.md").read_text().partition("## An engine")[0]
    assert len(text.splitlines()) <= 40
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert all(word in text for word in ("It is for people", "make demo", "pip install", "images/flow.svg"))


def test_the_figures_are_those_of_the_runs():
    text = " ".join((ROOT / "README.md").read_text().split())
    lists, step, _, ours_of_lists, ours = plots.lower_quartiles(plots.read(plots.PEERS))
    for points in (lists, step, ours_of_lists):
        assert f"{points[1]:,.0f} to {points[1024]:,.0f}" in text
        assert re.search(rf"(take|:) (\S+ )?{points[256]:,.0f}\b|{points[256]:,.0f} us", text)
    assert f"{ours[1]:.1f} to {ours[1024]:.1f}" in text
    assert f"256 decodes take {ours[256]:.1f} us" in text
    rows = {key: row["attncore_us"]["median"] for key, row in plots.decodes(plots.read(plots.SERVED)).items()}
    assert f"attncore takes {rows['flash', 64]:.0f} us" in text
    assert f"With 256 it is {rows['flash', 256]:.0f} us" in text
    assert f"with FlashInfer {rows['flashinfer', 64]:.0f} and {rows['flashinfer', 256]:.0f}" in text


def test_the_model_of_the_readme_runs(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    _, block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert [len(output) for output in names["outputs"]] == [8, 8]


def test_the_engine_is_as_short_as_the_readme_says():
    assert len((ROOT / "examples" / "engine.py").read_text().splitlines()) < 350
