"""docs/device.md: its first snippet runs behind those of use-in-an-engine.md that it goes on from."""

import dataclasses
import pathlib
import re
from contextlib import nullcontext

import pytest

import attncore
from attncore import graphs
from attncore.reference import ReferenceBackend

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


class Recorded:
    """A stand-in for a graph: a replay is counted."""

    def __init__(self, device):
        self.replays = 0

    def replay(self):
        self.replays += 1


def test_the_first_snippet_goes_on_from_the_tutorial(monkeypatch):
    """On a CPU, with stand-ins for graphs: a capture runs what is in it."""
    pytest.importorskip("torch")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    cpu = attncore.Host.assume("cpu")
    monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: cpu))
    monkeypatch.setattr(graphs, "new_graph", Recorded)
    monkeypatch.setattr(graphs, "capturing", nullcontext)
    made = ReferenceBackend.__init__

    def capturable(self, config):
        made(self, dataclasses.replace(config, spec=dataclasses.replace(config.spec, cuda_graph="uniform_decode")))

    monkeypatch.setattr(ReferenceBackend, "__init__", capturable)
    names = {}
    for snippet in snippets("use-in-an-engine.md"):
        exec(compile(snippet, "docs/use-in-an-engine.md", "exec"), names)
        if "attend" in names:
            break
    names["builder"].close()
    names["model"] = names["attend"]
    exec(compile(snippets("device.md")[0], "docs/device.md", "exec"), names)
    assert sorted(names["graphs"]) == [1, 2, 4, 8]
    assert sum(graph.replays for graph in names["graphs"].values()) == 1
