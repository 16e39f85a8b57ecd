"""The conformance kit over latent caches (MLA) on a GPU, with the real operator of FlashAttention 3 in vLLM's wheel."""

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
    """vLLM's build of generation 3 alone, whatever else is installed."""
    return flash_gpu.subject("3_vllm", use_mla=True)
