"""advance_step and prepare are calls of the list builder: one at a time, whoever calls from inside or beside them."""

import sys
import threading
from itertools import count

import numpy as np
import pytest
from builder.lists.captured_state import made
from builder.lists.decodes import decodes, fields
from interrupted_calls import AtOpcode

from attncore import CommonMetadataBuilder
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.errors import ConcurrentUseError

INSIDE = "^builder: another caller is inside it"


class Calls:
    """A block id that calls from where it is read, once, and keeps what came of it."""

    def __init__(self, value):
        self.value, self.call, self.error = value, None, None

    def __index__(self):
        call, self.call = self.call, None
        if call is not None:
            try:
                call()
            except ConcurrentUseError as error:
                self.error = error
        return self.value


@pytest.mark.parametrize("inner", ["advance", "build", "prepare"])
def test_a_block_id_that_calls_the_builder(kernels, inner):
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16, kernels=kernels)
    state = CommonAttentionState(builder=builder)
    with state.graph_capture(1):
        state.metadata_for_capture(1)
    item = Calls(6)
    metadata = builder.build(decodes([(3, [5, item, 7])]), 0)
    calls = {
        "advance": metadata.advance_step,
        "build": lambda: builder.build(decodes([(1, [1])])),
        "prepare": lambda: state.prepare(metadata),
    }
    item.call = calls[inner]
    metadata.advance_step()
    with pytest.raises(ConcurrentUseError, match=INSIDE):
        raise item.error
    expected = fields(builder.build(decodes([(4, [5, 6, 7])]), 0))
    found = fields(metadata)
    assert metadata.advanced == 1
    assert found | {"block_table_bound": None} == expected | {"block_table_bound": None}


class AdvancesToo(np.ndarray):
    """Input tokens that advance the step again where they are written to."""

    def __setitem__(self, key, value):
        self.metadata.advance_step()


def test_what_an_advance_calls_cannot_advance(kernels):
    """A plan, and the engine's tokens: the advance is refused with the one inside it, and changes nothing."""
    builder = CommonMetadataBuilder(4, kernels=kernels)
    metadata = builder.build(decodes([(1, [5, 6])]))
    before = fields(metadata)
    tokens = np.zeros(1, np.int64).view(AdvancesToo)
    tokens.metadata = metadata
    with pytest.raises(ConcurrentUseError, match=INSIDE):
        metadata.advance_step(tokens, np.array([3]))
    assert (fields(metadata), metadata.advanced) == (before, 0)
    builder.plan = lambda step: metadata.advance_step()
    for call in (metadata.advance_step, lambda: builder.build(decodes([(1, [7])]))):
        with pytest.raises(ConcurrentUseError, match=INSIDE):
            call()
        assert (fields(metadata), metadata.advanced) == (before, 0)
    builder.plan = None
    metadata.advance_step()
    assert metadata.advanced == 1


def test_two_threads_advance_one_step(kernels):
    """Each advance happens, or is refused; the step is that of as many as happened."""
    builder, wrong, done = CommonMetadataBuilder(4, "flashinfer", kernels=kernels), [], []
    interval = sys.getswitchinterval()
    tables = [list(range(40 * row + 1, 40 * row + 40)) for row in range(4)]

    def work():
        for _ in range(10):
            try:
                metadata.advance_step()
                done.append(1)
            except ConcurrentUseError:
                continue
            except BaseException as error:
                wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            done.clear()
            metadata = builder.build(decodes([(1, table) for table in tables]))
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            expected = builder.build(decodes([(1 + len(done), table) for table in tables]))
            assert not wrong
            assert metadata.advanced == len(done)
            for name in ("context_lens", "slot_mapping", "seq_start_loc", "paged_kv_indices"):
                assert getattr(metadata.host, name).tolist() == getattr(expected.host, name).tolist()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", ["build", "metadata_for_capture"])
def test_the_buffers_hold_one_step(kernels, name):
    """Whatever step a signal's handler, or another thread, prepares while another one is written there."""
    refused = 0
    for number in count():
        builder, state = made("flashinfer", sizes=(2,), kernels=kernels)
        first = builder.build(decodes([(7, [1, 2]), (3, [5])]), 0)
        steps = {"build": lambda state=state: state.build(decodes([(5, [8, 9])]), 1)}
        with state.graph_capture(2):
            steps["metadata_for_capture"] = lambda state=state: state.metadata_for_capture(2)
            errors = []

            def prepare(state=state, first=first, errors=errors):
                try:
                    state.prepare(first)
                except ConcurrentUseError as error:
                    errors.append(error)

            with AtOpcode(number, prepare) as handler:
                steps[name]()
        refused += len(errors)
        found = fields(state._steps.metadata[2])["seq_lens"], fields(state._steps.metadata[2])["paged_kv_indices"][:3]
        empty = {"build": ([6, 1], [8, 9, 0]), "metadata_for_capture": ([1, 1], [0, 0, 0])}[name]
        assert found in (empty, ([8, 4], [1, 2, 5])), number
        prepared = state._steps.prepared[0]
        assert (prepared is first) == (found != empty), number
        if not handler.fired:
            break
    assert refused > 5
