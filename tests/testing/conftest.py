"""The fixtures of planting.py, and those that put torch back."""

import pytest
from planting import site

__all__ = ["site"]


@pytest.fixture(scope="session", autouse=True)
def torch_at_first():
    """Torch's settings before any backend of these tests has run."""
    import torch

    return torch.get_default_dtype(), torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def torch_as_it_was(torch_at_first):
    """Backends with a planted fault change torch's settings in this process: later tests are not to find them so, nor
    those of a run that a fixture of wider scope made.
    """
    import torch

    def put_back():
        dtype, gradients = torch_at_first
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)

    put_back()
    yield
    put_back()
