"""The fixture of planting.py; and one thread: on a busy machine, threads that wait for each other cost more than the
tiny models here compute.
"""

import pytest
from planting import site

__all__ = ["one_thread", "site"]

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
