"""How many examples a target runs: few in ``make test``, many times as many in ``make fuzz`` (the profile ``fuzz``)."""

from hypothesis import HealthCheck, settings

PROFILE = "fuzz"
TIMES = 20
"""What the profile multiplies the examples by. A round of all targets then takes minutes, and ``make fuzz`` repeats it."""


def examples(count, steps=40):
    """The settings of a target that runs ``count`` examples, of ``steps`` calls each where it is a state machine."""
    count *= TIMES if settings.get_current_profile_name() == PROFILE else 1
    return settings(
        max_examples=count, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
