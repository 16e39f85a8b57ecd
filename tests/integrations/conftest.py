"""Models here are tiny: threads that wait for each other on a busy machine cost more than they compute."""

import dataclasses

import pytest

from attncore.reference import ReferenceBackend

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """What makes an engine of examples/engine.py run captured decodes on a CPU, by stand-ins for graphs."""
    made = ReferenceBackend.__init__

    def capturable(self, config):
        made(self, dataclasses.replace(config, spec=dataclasses.replace(config.spec, cuda_graph="uniform_decode")))

    monkeypatch.setattr(ReferenceBackend, "__init__", capturable)
    return {"graph_sizes": (1, 2, 4), "transport": "copy", "backend": "reference", "cuda_graph": "never"}
