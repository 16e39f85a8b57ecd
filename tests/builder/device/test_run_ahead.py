"""Steps ahead are the steps that would be built one by one, on the device and as they are asked for on the host."""

import pytest
from builder.device.ahead_engine import GROUPS, AheadEngine


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_ahead_are_those_that_would_be_built(kernels, groups, depth):
    engine = AheadEngine(depth, groups=groups, kernels=kernels, depth=depth, transport="copy")
    while engine.steps < 120:
        engine.turn()
