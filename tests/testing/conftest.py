"""The fixtures of planting.py, and one that puts torch back."""

import pytest
from planting import site

__all__ = ["site"]


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """Backends with a planted fault change torch's settings in this process: later tests are not to find them so."""
    import torch

    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)
