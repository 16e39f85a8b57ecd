"""What is read of a request while a build runs is that request's, or refused."""

import sys
import threading

import pytest

from attncore.builder import InputBatch, MetadataBuilder
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


@pytest.mark.parametrize("number", [1, 4])
def test_reads_of_a_signals_handler(kernels, number):
    """Here before each bytecode of a build, which a handler may come between."""
    batch, builder = moving(kernels)
    step(batch, builder, 0)
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
        builder.build({name: 3 if name == number else 1 for name in NAMES})
    finally:
        sys.settrace(None)
    assert reads > 100
    assert found == []
    assert batch.block_ids(number) == [*range(4 * number + 1, 4 * number + 5)]
    assert batch.num_computed_tokens(number) == number + 4
