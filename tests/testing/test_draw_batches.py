"""What the kit says of a failure that is gone when the same steps run again."""

import pytest
from hypothesis import strategies as st

from attncore.testing.harness.draw_batches import explore
from attncore.testing.harness.errors import ConformanceError


def test_what_is_right_when_it_is_run_again_was_kept_from_an_earlier_step():
    calls = iter(range(10**6))

    def check(length):
        if next(calls) == 3:
            raise ConformanceError("the output differs by 2.2")

    with pytest.raises(ConformanceError, match=r"^the output differs by 2\.2; run again, the same steps were right: "):
        explore(check, 20, length=st.integers(0, 50))


def test_what_fails_each_time_is_said_as_it_is():
    def check(length):
        if length > 3:
            raise ConformanceError(f"{length} differs")

    with pytest.raises(ConformanceError, match=r"^4 differs"):
        explore(check, 50, length=st.integers(0, 50))
