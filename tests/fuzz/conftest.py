"""The profile of ``make fuzz``, and the limit of memory of every target."""

import pytest
from fuzz.budget import PROFILE, TIMES, USUAL, limited_memory
from hypothesis import settings

# Seeds are new in each round, and examples that failed are tried first in the next.
settings.register_profile(PROFILE, max_examples=TIMES * USUAL, print_blob=True)


@pytest.fixture(autouse=True, scope="module")
def memory():
    with limited_memory():
        yield
