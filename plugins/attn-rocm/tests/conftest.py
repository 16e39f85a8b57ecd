"""Tests in ``under_device`` run where the kernels run: in processes of their own, which ``test_devices.py`` starts."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # rocm_standins

collect_ignore = [] if "ATTNCORE_ROCM_DEV_DEVICE" in os.environ else ["under_device"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, request):
    """The variables that the plugin reads are a test's own to set."""
    if "under_device" not in str(request.path):
        for name in ("ATTNCORE_ROCM_KERNEL", "FLASH_ATTENTION_TRITON_AMD_ENABLE"):
            monkeypatch.delenv(name, raising=False)
