"""What is read of a request while a build runs is that request's, or refused."""

import sys
import threading
from itertools import count

import pytest
from interrupted_calls import AtOpcode

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import ConcurrentUseError

NAMES = range(6)


def moving(kernels):
    """A batch whose builds move rows: each time another request runs the prompt, and comes last."""
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=4, kernels=kernels)
    for name in NAMES:
        batch.add_request(name, range(4 * name + 1, 4 * name + 5), name + 1)
    return batch, MetadataBuilder(batch, max_num_batched_tokens=64)


def step(batch, builder, number):
    builder.build({name: 3 if name == number % len(NAMES) else 1 for name in NAMES})
    batch.rollback_many({name: 3 if name == number % len(NAMES) else 1 for name in NAMES})


def wrong(batch):
    """The requests of which something is read that is another's; refusals are none."""
    found = []
    for name in NAMES:
        try:
            if batch.block_ids(name) != [*range(4 * name + 1, 4 * name + 5)]:
                found.append(name)
        except ConcurrentUseError:
            continue
    return found


def test_reads_of_another_thread(kernels):
    batch, builder = moving(kernels)
    step(batch, builder, 0)
    found, done, before = [], threading.Event(), sys.getswitchinterval()

    def read():
        while not done.is_set():
            found.extend(wrong(batch))

    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(150):
            step(batch, builder, number)
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(before)
    assert found == []
    assert wrong(batch) == []
    assert batch.block_ids(3) == [13, 14, 15, 16]


def refuse(metadata, out):
    raise RuntimeError("this step is not built")


def refused_build(batch):
    """A build that moves rows and puts them back."""
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    builder.register_field("number", "int64", "request", refuse)

    def build():
        with pytest.raises(RuntimeError, match="this step is not built"):
            builder.build({name: 3 if name == 1 else 1 for name in NAMES})

    return build


def stopped_steps(batch):
    """Steps ahead of which none ran: the first of them, which moved rows, is taken back."""
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, transport="copy")
    builder.capture(len(NAMES))
    return builder.run_ahead(2, bucket=len(NAMES), scheduled={1: 0}).stop


MOVING = {
    "a build": lambda batch, builder: lambda: builder.build({name: 3 if name == 1 else 1 for name in NAMES}),
    "another build": lambda batch, builder: lambda: builder.build({name: 3 if name == 4 else 1 for name in NAMES}),
    "a build that is refused": lambda batch, builder: refused_build(batch),
    "swap_rows": lambda batch, builder: lambda: batch.swap_rows(1, 4),
    "stop": lambda batch, builder: stopped_steps(batch),
}


@pytest.mark.parametrize("what", MOVING)
def test_reads_of_a_signals_handler(kernels, what):
    """Here before each bytecode of a call that moves rows, which a handler may come between."""
    batch, builder = moving(kernels)
    step(batch, builder, 0)
    call = MOVING[what](batch, builder)
    found, reads = [], 0

    def trace(frame, event, arg):
        nonlocal reads
        if "attncore" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            reads += 1
            sys.settrace(None)
            found.extend(wrong(batch))
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    assert reads > 50
    assert found == []
    assert wrong(batch) == []


CALLS = {
    "preempt": lambda batch: batch.preempt("a"),
    "append_blocks": lambda batch: batch.append_blocks("a", {"one": [3], "other": [13]}),
    "truncate_blocks": lambda batch: batch.truncate_blocks("a", 1, "other"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_comes_into_a_read(kernels, name):
    """As of a signal's handler, or another thread that had its turn: what is read is of before or behind it."""
    for number in count():
        groups = [KVCacheGroup("one", 4), KVCacheGroup("other", 4)]
        batch = InputBatch(max_num_reqs=2, max_model_len=64, groups=groups, kernels=kernels)
        batch.add_request("a", {"one": [1, 2], "other": [11, 12]}, 1)
        before, found = batch.block_ids("a"), None
        with AtOpcode(number, lambda batch=batch: CALLS[name](batch)) as handler:
            found = batch.block_ids("a")
        assert found in (before, batch.block_ids("a")), number
        if not handler.fired:
            break
    assert number > 50
