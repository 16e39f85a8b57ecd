"""The kit: on a CUDA device in full, in Triton's interpreter over few batches (all of it is slow there)."""

import os

import pytest

from attncore.testing.suite import *  # noqa: F403

BACKEND = "rocm"
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
"""NumPy's, in the interpreter: the exponential of a score far beyond its cap is infinite."""
_ON_GPU = os.environ["ATTNCORE_ROCM_DEV_DEVICE"] == "cuda"
EXAMPLES = 40 if _ON_GPU else int(os.environ.get("ATTN_ROCM_EXAMPLES", "1"))
CAPTURED_STEPS = 1000 if _ON_GPU else 3
