"""Captured decodes of examples/engine.py on a CPU, by stand-ins for graphs."""

import dataclasses
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from attncore.reference import ReferenceBackend


@contextmanager
def graphs_on_cpu(transport, monkeypatch, level="uniform_decode"):
    """The arguments that make an engine run captured decodes; with ``graph`` the host does what their nodes would."""
    made = ReferenceBackend.__init__

    def capturable(self, config):
        made(self, dataclasses.replace(config, spec=dataclasses.replace(config.spec, cuda_graph=level)))

    monkeypatch.setattr(ReferenceBackend, "__init__", capturable)
    with nodes(monkeypatch) if transport == "graph" else nullcontext():
        yield {"graph_sizes": (1, 2, 4), "transport": transport, "backend": "reference", "cuda_graph": "never"}


def nodes(monkeypatch):
    pytest.importorskip("triton", reason="the transport with nodes needs triton's module")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from nodes_on_host import NodesOnHost, nodes_on_host

    monkeypatch.delattr(NodesOnHost, "send_with_all")  # the reference backend reads fields that it does not declare
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return nodes_on_host(lambda call, name: call)
