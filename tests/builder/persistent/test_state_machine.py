"""The random sequences of tests/batches.py, on both implementations of the kernels."""

from batches import Batches
from hypothesis import HealthCheck, settings


class NumbaBatches(Batches):
    kernels = "numba"


runs = settings(max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestBatches = Batches.TestCase
TestBatches.settings = runs
TestNumbaBatches = NumbaBatches.TestCase
TestNumbaBatches.settings = settings(runs, max_examples=40)
