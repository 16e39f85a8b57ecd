"""The conformance kit on a GPU, with the real libraries: generation 4 where it is installed, else generation 2.

With both installed the kit takes the first that fits; hide flash-attn-4 to have it test generation 2.
"""

from __future__ import annotations

import pytest
import torch

from attncore.testing.suite import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # of generation 4 while it compiles
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

BACKEND = "flash"
EXAMPLES = 12
CAPTURED_STEPS = 1000
