"""The fixtures of the kit. An adopter does not override them; it sets names in its test file.

``BACKEND`` (required): the backend's name. ``EXAMPLES`` (40): batches drawn by each test that draws any. ``DEVICE``
(None: the negotiation's): a torch device. ``OPTIONS`` ({}): options that the backend is created with. ``USE_MLA``
(False): every test asks for latent caches, of a backend that has variants for them.
``CAPTURED_STEPS`` (40): steps that run through captured graphs.
``EXPECTED_FAILURES`` ({}): test name (with its parameters, or without: all of them) -> why it fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attncore.arguments import flag
from attncore.testing.harness.subject import Subject

EXAMPLES = 40
CAPTURED_STEPS = 40


@pytest.fixture(scope="module")
def attncore_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The backend under test."""
    name = getattr(request.module, "BACKEND", None)
    if not isinstance(name, str):
        raise ValueError('BACKEND: the test file must name the backend: BACKEND = "acme"')
    # Steps are tiny: threads that wait for each other on a busy machine cost more than they compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Subject(
        name,
        device=getattr(request.module, "DEVICE", None),
        options=getattr(request.module, "OPTIONS", None),
        use_mla=flag("USE_MLA", getattr(request.module, "USE_MLA", False)),
    )
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def attncore_examples(request: pytest.FixtureRequest) -> int:
    """How many batches a test draws."""
    return int(getattr(request.module, "EXAMPLES", EXAMPLES))


@pytest.fixture(scope="module")
def attncore_captured_steps(request: pytest.FixtureRequest) -> int:
    """How many steps go through captured graphs."""
    return int(getattr(request.module, "CAPTURED_STEPS", CAPTURED_STEPS))
