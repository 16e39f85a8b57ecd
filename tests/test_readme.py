"""The README's engine runs as it stands."""

import pathlib
import re

import pytest

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


def test_the_model_of_the_readme_runs(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    _, block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert [len(output) for output in names["outputs"]] == [8, 8]


def test_the_engine_is_as_short_as_the_readme_says():
    assert len((ROOT / "examples" / "engine.py").read_text().splitlines()) < 350
