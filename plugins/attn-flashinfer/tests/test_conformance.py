"""attncore's conformance kit: everything on a CUDA device, what concerns the spec elsewhere."""

import pytest
import torch

from attncore.testing.suite import *  # noqa: F403

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
BACKEND = "flashinfer"
CAPTURED_STEPS = 1000 if torch.cuda.is_available() else 40
