"""``metadata.step`` of the list builder: every step that is planned has a number of its own, in order."""

import copy

import numpy as np
import pytest
from builder.lists.captured_state import decodes, made

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.reference import ReferenceBackend

ROWS = decodes([(5, [0, 1, 2]), (2, [3, 4])])
PROMPT = [SequenceGroup(True, [Sequence(0, 3, 0, [0, 1])])]


class Planning(ReferenceBackend):
    """Notes the number of each step that it plans; refuses those that ``refuses`` says."""

    def __init__(self):
        super().__init__(BackendConfig(2, 1, 8, "float32", 4))
        self.planned, self.refuses = [], False

    def plan(self, metadata):
        if self.refuses:
            raise ValueError("metadata: refused")
        self.planned.append(metadata.step)


@pytest.fixture
def planning(kernels):
    """(builder, backend)."""
    backend = Planning()
    return CommonMetadataBuilder(4, max_seq_len_to_capture=16, backend=backend, kernels=kernels), backend


def test_builds_and_advances_are_counted(planning):
    builder, backend = planning
    first, second = builder.build(ROWS), builder.build(ROWS)
    assert (first.step, second.step) == (0, 1)
    first.advance_step()
    assert (first.step, second.step) == (2, 1)
    prompt = builder.build(PROMPT)
    prompt.advance_step(turn_prefills_into_decodes=True)
    prompt.advance_step()
    assert (prompt.step, backend.planned) == (5, [0, 1, 2, 3, 4, 5])
    assert copy.copy(prompt).step == 5
    assert prompt.decode_metadata.step == 0  # a view is no step of the builder's
    assert CommonMetadataBuilder(4).build(ROWS).step == 0  # each builder counts its own


def test_a_step_that_did_not_happen_has_no_number(planning):
    builder, backend = planning
    step, prompt = builder.build(ROWS), builder.build(PROMPT)
    backend.refuses = True
    for refused in (
        lambda: builder.build(ROWS),
        step.advance_step,
        lambda: prompt.advance_step(turn_prefills_into_decodes=True),
    ):
        with pytest.raises(ValueError, match=r"^metadata: refused"):
            refused()
    with pytest.raises(ValueError, match="context_len"):
        builder.build(decodes([(-1, [0])]))
    backend.refuses = False
    assert (step.step, prompt.step, builder.build(ROWS).step) == (0, 1, 2)


def test_an_advance_whose_tokens_are_refused_keeps_its_number(planning):
    builder, _ = planning
    step, prompt = builder.build(ROWS), builder.build(PROMPT)

    class Refusing(np.ndarray):
        def __setitem__(self, *_):
            raise RuntimeError("no")

    tokens = np.zeros(2, np.int64).view(Refusing)
    with pytest.raises(RuntimeError, match="no"):
        step.advance_step(tokens, np.arange(2))
    with pytest.raises(RuntimeError, match="no"):
        prompt.advance_step(tokens[:1], np.arange(1), turn_prefills_into_decodes=True)
    assert (step.step, prompt.step, builder.build(ROWS).step) == (0, 1, 2)


@pytest.mark.parametrize("plans", [False, True])
def test_a_captured_size_has_the_number_of_the_step_that_it_holds(kernels, plans):
    backend = Planning() if plans else None
    builder, state = made("flashinfer", backend=backend, kernels=kernels)
    if plans:
        assert backend.planned == [0, 1, 2]  # the empty steps of the three sizes
    step = builder.build(ROWS, state.pad_size(2))
    captured = state.prepare(step)
    assert step.step == captured.step == 3
    step.advance_step()
    assert (captured.step, state.prepare(step).step) == (3, 4)
    assert state.build(ROWS, 0).step == captured.step == 5
    with state.graph_capture(4):
        assert state.metadata_for_capture(2) is captured
    assert captured.step == 6
