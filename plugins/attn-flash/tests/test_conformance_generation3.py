"""The conformance kit over generation 3's adapter, with the operator in torch on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import flash_standin as standin
import pytest
import torch

from attncore import Host
from attncore.testing.harness.subject import Subject
from attncore.testing.suite import *  # noqa: F403

BACKEND = "flash"
EXAMPLES = 6


@pytest.fixture(scope="module")
def attncore_subject() -> Iterator[Subject]:
    """The backend on an assumed H100 that has generation 3 only, run on the CPU by the stand-in."""
    host = Host.assume("sm_90", packages=standin.packages("3"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        standin.install(patch, "3", standin.Generation3(sinks=False))
        yield Subject(BACKEND, device="cpu", host=host)
    torch.set_num_threads(threads)
