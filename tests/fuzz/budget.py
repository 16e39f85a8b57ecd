"""How many examples a target runs, few in ``make test`` and many in ``make fuzz``, and how much memory it may take."""

import contextlib
import os
import resource

from hypothesis import HealthCheck, Phase, settings

PROFILE = "fuzz"
USUAL = 100
"""The examples of a test in hypothesis' own profile."""
TIMES = 20
"""What the profile multiplies the examples by. A round of all targets takes minutes; ``make fuzz`` repeats it."""
MORE_MEMORY = 2 << 30


def examples(count, steps=40):
    """The settings of a target that runs ``count`` examples, of ``steps`` calls each where it is a state machine.

    Nothing is explained: that traces each line, and tracing meets exceptions of objects that lie where none may be set.
    """
    return settings(
        max_examples=count * settings.default.max_examples // USUAL, stateful_step_count=steps, deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )  # fmt: skip


@contextlib.contextmanager
def limited_memory():
    """A call that asks for more than 2 GiB beyond what the process has is a MemoryError, not the end of the machine.

    The sanitizer reserves more than that for itself, and has a limit of its own (the Makefile).
    """
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        yield
        return
    with open("/proc/self/statm") as text:
        now = int(text.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
