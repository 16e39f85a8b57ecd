"""AdoptedSteps reads the memory of the tensors it is given, none beyond it, and lets one caller in at a time."""

import sys
import threading

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import MODEL_LEN, int32, reference
from builder.plain_backend import Least, config

from attncore import AdoptedSteps
from attncore.errors import ConcurrentUseError

LARGEST = {"max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": MODEL_LEN, "num_blocks": 200}


def tensors():
    return {
        "query_start_loc": int32(0, 1, 2),
        "seq_lens": int32(5, 9),
        "block_table": torch.arange(1, 31, dtype=torch.int32).view(2, 15),
        "slot_mapping": torch.arange(2),
    }


@pytest.fixture
def steps():
    return AdoptedSteps(reference(), **LARGEST)


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("lead", ["data", "set_", "resize_"])
def test_a_tensor_that_is_led_elsewhere_is_not_found_again(steps, name, lead):
    """A view that lies where it lay is a step of its own memory, not of that which the first tensor has now."""
    given = tensors()
    given[name] = given[name].clone()
    alias, moved = given[name][:], given[name]
    steps.build(**given)
    if lead == "data":
        moved.data = torch.zeros_like(moved)
    elif lead == "set_":
        moved.set_(torch.zeros_like(moved))
    else:
        moved.resize_(0)
    metadata = steps.build(**(given | {name: alias}))
    assert getattr(metadata, name).tolist() == alias.tolist() == tensors()[name].tolist()
    assert metadata.host.seq_lens.tolist() == [5, 9]


def test_memory_that_moved_is_not_found_at_its_old_address(steps):
    """torch moves the memory that views share; what lies at the old address then is another tensor's."""
    given = tensors()
    first = given["seq_lens"]
    host = {"host_query_start_loc": np.arange(3, dtype=np.int32), "host_seq_lens": np.array(first.tolist(), np.int32)}
    place = steps.build(**given, **host).seq_lens.data_ptr()
    first.untyped_storage().resize_(1 << 16)
    assert first.data_ptr() != place
    size = steps._sizes.by_rows[2]
    other = int32(3, 4)
    size.key = (size.key[0]._replace(lengths=other.data_ptr()), *size.key[1:])  # as if it had the old address
    metadata = steps.build(**(given | {"seq_lens": other}))
    assert metadata.seq_lens.tolist() == [3, 4]


def beyond(count):
    """A tensor int32 that torch left with the shape of a resize which it refused; it has 1000 elements of memory."""
    view = torch.from_numpy(np.ones(2000, np.int32))[1000:1002]
    with pytest.raises(RuntimeError):
        view.resize_(count)
    assert len(view) == count
    return view


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "host_query_start_loc", "host_seq_lens"])
def test_a_tensor_that_reaches_beyond_its_memory_is_refused(name):
    steps = AdoptedSteps(reference(), **(LARGEST | {"max_num_reqs": 60000, "max_num_tokens": 60000}))
    given = {
        "query_start_loc": torch.arange(60001, dtype=torch.int32), "seq_lens": torch.ones(60000, dtype=torch.int32),
        "block_table": torch.ones((60000, 1), dtype=torch.int32), "slot_mapping": torch.arange(60000),
    }  # fmt: skip
    given[name] = beyond(60000 + name.endswith("query_start_loc"))
    with pytest.raises(ValueError, match=f"^{name}: shape .* reaches beyond the tensor's memory"):
        steps.build(**given)
    assert steps.last_step == -1


def test_a_table_and_slots_that_reach_beyond_their_memory_are_refused(steps):
    for name in ("block_table", "slot_mapping"):
        given = tensors()
        wide = given[name] = given[name].clone()
        shape = wide.shape
        wide.untyped_storage().resize_(4)
        assert wide.shape == shape
        with pytest.raises(ValueError, match=f"^{name}: shape .* reaches beyond"):
            steps.build(**given)


@pytest.mark.parametrize("name", list(tensors()))
def test_known_memory_that_is_less_now_is_refused(steps, name, monkeypatch):
    """torch may shrink memory in place, which leaves shape and address as they were."""
    given = tensors()
    given[name] = given[name].clone()
    assert steps.build(**given).step == 0
    known = given[name].data_ptr()
    monkeypatch.setattr("attncore.builder.adopted.given.beyond_its_memory", lambda tensor: tensor.data_ptr() == known)
    with pytest.raises(ValueError, match=f"^{name}: shape .* reaches beyond the tensor's memory"):
        steps.build(**given)
    assert steps.last_step == 0


@pytest.mark.parametrize("name", ["host_query_start_loc", "host_seq_lens"])
def test_numbers_whose_parts_have_names_are_refused_by_name(steps, name):
    parts = np.dtype((np.int32, {"low": (np.int16, 0), "high": (np.int16, 2)}))
    with pytest.raises(ValueError, match=f"^{name}: "):
        steps.build(**tensors(), **{name: np.zeros(2 + (name != "host_seq_lens"), parts)})


class Entering(Least):
    """Calls what it is told from its plan."""

    inner = None

    def plan(self, metadata):
        if self.inner is not None:
            call, self.inner = self.inner, None
            call()


@pytest.mark.parametrize("name", ["cython", "numba"])
@pytest.mark.parametrize("call", ["build", "capture", "release"])
def test_a_plan_that_calls_its_steps_is_refused(name, call):
    backend = Entering(config())
    steps = AdoptedSteps(backend, **LARGEST, kernels=name)
    other = tensors() | {"seq_lens": int32(50, 60)}
    calls = {"build": lambda: steps.build(**other), "capture": lambda: steps.capture(2)}
    backend.inner = calls.get(call, lambda: steps.release(2))
    with pytest.raises(ConcurrentUseError, match="steps: a caller is inside them already"):
        steps.build(**tensors())
    assert (steps.last_step, steps.captured) == (-1, ())
    metadata = steps.build(**tensors())
    assert (metadata.step, metadata.host.seq_lens.tolist()) == (0, [5, 9])


def test_another_thread_is_refused_while_a_step_is_planned():
    backend, refused = Entering(config()), []
    steps = AdoptedSteps(backend, **LARGEST)

    def build():
        try:
            steps.build(**tensors())
        except ConcurrentUseError as error:
            refused.append(error)

    def in_a_thread():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()

    backend.inner = in_a_thread
    assert steps.build(**tensors()).step == 0
    assert (len(refused), steps.last_step) == (1, 0)


def test_an_interrupted_page_buffer_is_made_by_the_next_call(steps):
    """An interrupt between any two opcodes of it leaves none, or all of it."""
    fields = steps._fields
    code, before = type(fields).page_buffer.fget.__code__, sys.gettrace()
    for opcode in (200, *range(200)):  # from Python 3.12 on the opcodes of a first call may not be traced
        fields._pages = fields._page_buffer = None
        left = opcode

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                sys.settrace(before)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            _ = fields.page_buffer
        except KeyboardInterrupt:
            assert fields.page_buffer is not None
        else:
            if opcode < 200:
                break
        finally:
            sys.settrace(before)
    assert 10 < opcode < 199


def build_with_host(steps, given):
    """A step whose tensors NumPy has not seen: torch may take memory of theirs away."""
    host = {f"host_{name}": np.array(given[name].tolist(), np.int32) for name in ("query_start_loc", "seq_lens")}
    return steps.build(**given, **host)


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("asked", ["host", "positions", "paged_kv_indices"])
def test_memory_that_is_less_behind_a_build_is_not_read(steps, name, asked):
    """A field that is made when it is first asked for is made of tensors that lie as they lay at the build."""
    given = {key: tensor.clone() for key, tensor in tensors().items()}
    metadata = build_with_host(steps, given)
    given[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: shape .* reaches beyond the tensor's memory"):
        getattr(metadata, asked)
    assert build_with_host(steps, tensors()).positions.tolist() == [4, 8]


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])  # NumPy has seen the others
def test_a_failed_build_does_not_read_a_last_step_whose_memory_is_less(name):
    backend = Entering(config())
    steps = AdoptedSteps(backend, **LARGEST)
    given = {key: tensor.clone() for key, tensor in tensors().items()}
    last = build_with_host(steps, given)
    for field in ("positions", "query_lens", "paged_kv_indices"):
        getattr(last, field)
    given[name].untyped_storage().resize_(0)
    written = []

    def fail():
        steps._fields.written |= steps._fields.live  # as if it had been interrupted behind them
        written.append(steps._fields.written)
        raise ZeroDivisionError

    backend.inner = fail
    with pytest.raises(ZeroDivisionError):
        build_with_host(steps, tensors())
    assert (steps.last_step, len(written)) == (0, 1)
    assert build_with_host(steps, tensors()).positions.tolist() == [4, 8]
