"""Models here are tiny: threads that wait for each other on a busy machine cost more than they compute."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
