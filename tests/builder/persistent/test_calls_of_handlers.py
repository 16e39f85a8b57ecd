"""What a signal's handler does to a batch happens before the call that it comes into, or is refused."""

import sys
from itertools import count

import pytest

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import ConcurrentUseError

NAMES = "abc"
CALLS = {
    "append_blocks": lambda batch: batch.append_blocks("a", given(batch, [91])),
    "append_blocks_many": lambda batch: batch.append_blocks_many({"a": given(batch, [91]), "c": given(batch, [92])}),
    "rollback_many": lambda batch: batch.rollback_many({"a": 1, "c": 2}),
}


def given(batch, ids):
    return ids if len(batch.groups) == 1 else {"one": ids}


def batch_of(kernels, groups):
    own = {"block_size": 4} if groups == 1 else {"groups": [KVCacheGroup("one", 4), KVCacheGroup("other", 4)]}
    batch = InputBatch(max_num_reqs=4, max_model_len=64, kernels=kernels, **own)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    for row, name in enumerate(NAMES):
        ids = [10 * row + index for index in range(1, 5)]
        batch.add_request(name, ids if groups == 1 else {"one": ids, "other": ids}, 4 + row)

    def fill(metadata, out):
        raise RuntimeError("this step is not built")

    builder.register_field("number", "int64", "request", fill)
    return batch, builder


def state_of(batch):
    return {name: (batch.block_ids(name), batch.num_computed_tokens(name)) for name in batch.req_ids}


class Handler:
    """Has a build move rows that fails, and puts them back, before opcode ``number`` of attncore."""

    def __init__(self, builder, number):
        self.builder, self.left, self.ran = builder, number, False

    def trace(self, frame, event, arg):
        if "attncore" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.ran = True
                with pytest.raises((RuntimeError, ConcurrentUseError)):
                    self.builder.build({"a": 3})
        return self.trace


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_moved_and_moved_back_are_nobody_elses(kernels, name, groups):
    batch, _ = batch_of(kernels, groups)
    CALLS[name](batch)
    wanted = state_of(batch)
    for number in count():
        batch, builder = batch_of(kernels, groups)
        handler = Handler(builder, number)
        sys.settrace(handler.trace)
        try:
            CALLS[name](batch)
        finally:
            sys.settrace(None)
        assert state_of(batch) == wanted, number
        if not handler.ran:
            break
    assert number > 5
