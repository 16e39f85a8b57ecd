"""The conformance kit over latent caches (MLA), by the operator of vLLM's wheel: in torch, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import flash_standin as standin
import pytest
import torch

from attncore import Host
from attncore.testing.harness.subject import Subject
from attncore.testing.suite import *  # noqa: F403

BACKEND = "flash"
EXAMPLES = 4


@pytest.fixture(scope="module")
def attncore_subject() -> Iterator[Subject]:
    """The backend on an assumed H100 that has that wheel only, run on the CPU by the stand-in."""
    host = Host.assume("sm_90", packages=standin.packages("3_vllm"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        standin.install(patch, "3_vllm", standin.Generation3())
        yield Subject(BACKEND, device="cpu", host=host, use_mla=True)
    torch.set_num_threads(threads)
