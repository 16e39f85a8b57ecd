"""The conformance kit on a GPU, with the real flash_attn_3."""

from __future__ import annotations

import flash_gpu
import pytest
import torch

from attncore.testing.harness.subject import Subject
from attncore.testing.suite import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKEND = "flash"
EXAMPLES = 12
CAPTURED_STEPS = 1000


@pytest.fixture(scope="module")
def attncore_subject() -> Subject:
    """Generation 3 alone, whatever else is installed."""
    return flash_gpu.subject("3")
