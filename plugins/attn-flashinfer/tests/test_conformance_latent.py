"""attncore's conformance kit over latent caches: every row that has a variant for them. See test_conformance.py."""

import pytest
import torch

from attncore.testing.suite import *  # noqa: F403

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
BACKEND = "flashinfer"
USE_MLA = True
EXAMPLES = 20
CAPTURED_STEPS = 400 if torch.cuda.is_available() else 40
