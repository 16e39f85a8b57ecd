"""The random sequences of tests/batches.py, on both implementations of the kernels, against the plain-Python oracle."""

from batches import Batches
from fuzz.budget import examples


class NumbaBatches(Batches):
    kernels = "numba"


TestBatches = Batches.TestCase
TestBatches.settings = examples(100, steps=60)
TestNumbaBatches = NumbaBatches.TestCase
TestNumbaBatches.settings = examples(40, steps=60)
