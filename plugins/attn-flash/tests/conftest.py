"""Tests of attn-flash. Those marked ``gpu`` want a CUDA machine with flash-attn or flash-attn-4."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # flash_standin


@pytest.fixture(autouse=True)
def _own_findings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what was found on this machine, or leaves findings there; those of a GPU do both."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
