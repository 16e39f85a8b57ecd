"""Tests of the bridge into SGLang. Those in this folder that need SGLang run in its environment: make test-sglang."""

import os

import pytest


def pytest_collection_modifyitems(config, items):
    """Outside of SGLang's environment (``ATTNCORE_SGLANG``) tests marked ``sglang`` are skipped."""
    if os.environ.get("ATTNCORE_SGLANG"):
        return
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason="needs SGLang; run with make test-sglang"))
