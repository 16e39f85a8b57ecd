"""The conformance kit's rows of draft trees, and of moved tokens, on the CPU, the stand-in in FlashInfer's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import backend as module

from attncore import Host
from attncore.testing.checks.draft_trees import *  # noqa: F403
from attncore.testing.checks.kv_cache import test_slots_are_moved_within_caches as test_slots_are_moved_within_caches
from attncore.testing.harness.fixtures import attncore_examples as attncore_examples
from attncore.testing.harness.subject import Subject
from attncore.testing.suite import pytest_plugins as pytest_plugins

PACKAGES = {"flashinfer-python": "0.7.2.post1", "apache-tvm-ffi": "0.1.15.post2", "torch": "2.11.0"}
BACKEND = "flashinfer"
EXAMPLES = 20


@pytest.fixture(scope="module", params=[{}, {"cascade": True}], ids=str)
def attncore_subject(request: Any) -> Iterator[Subject]:
    """The backend on an assumed H100, run on the CPU by the stand-in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "flashinfer", standin.library)
        host = Host.assume("sm_90", packages=PACKAGES)
        yield Subject("flashinfer", device="cpu", options=request.param, host=host)
    torch.set_num_threads(threads)
