"""The profile of ``make fuzz``, and a limit of the memory that a target may take."""

import os
import resource

import pytest
from fuzz.budget import PROFILE
from hypothesis import settings

# Seeds are new in each round, and examples that failed are tried first in the next.
settings.register_profile(PROFILE, print_blob=True)
MORE = 2 << 30


@pytest.fixture(autouse=True, scope="module")
def memory():
    """A call that asks for more than 2 GiB beyond what the process has is a MemoryError, not the end of the machine.

    The sanitizer reserves more than that for itself, and has a limit of its own (the Makefile).
    """
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        yield
        return
    with open("/proc/self/statm") as text:
        now = int(text.read().split()[0]) * resource.getpagesize()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, usual)
