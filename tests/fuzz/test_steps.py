"""What metadata says of random steps, and of what is made of them: plain Python beside every field.

Each program draws groups, ranks, drafts, spans, states, transport and the fields that a backend declares, and then
steps of requests that come, go and change: eager, padded, overlapped and ahead, in views of views, slices, cuts, chunks
of local attention, ranks, and as another process has them.
"""

import random
from contextlib import closing

import pytest
from fuzz.budget import examples
from fuzz.steps.adopted_program import AdoptedProgram
from fuzz.steps.list_program import ListProgram
from fuzz.steps.program import Program
from hypothesis import given
from hypothesis import strategies as st

STEPS = 12


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@examples(10)
@given(seed=st.integers(0, 2**32 - 1))
def test_adopted_steps(kernels, seed):
    program = AdoptedProgram(random.Random(seed), kernels)
    for _ in range(STEPS):
        program.step()


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@examples(10)
@given(seed=st.integers(0, 2**32 - 1))
def test_list_steps(kernels, seed):
    program = ListProgram(random.Random(seed), kernels)
    for _ in range(STEPS):
        program.step()


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@examples(10)
@given(seed=st.integers(0, 2**32 - 1))
def test_steps(kernels, seed):
    with closing(Program(random.Random(seed), kernels)) as program:
        for _ in range(STEPS):
            program.step()
