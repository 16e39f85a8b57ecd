"""Calls of a batch or builder that a thread is inside of until they are let, for tests of threads and forks."""

import contextlib
import threading

from attncore.builder import InputBatch, MetadataBuilder


def new_builder(**options):
    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=4, **options)
    batch.add_request("a", range(1, 1000), 3)
    return MetadataBuilder(batch, max_num_batched_tokens=16)


class Waits(dict):
    """Its items end when they are let: a call that goes through them is inside until then."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.begun, self.let = threading.Event(), threading.Event()

    def items(self):
        yield from super().items()
        self.wait()

    def __index__(self):
        self.wait()
        return 3

    def wait(self):
        self.begun.set()
        self.let.wait(30)


@contextlib.contextmanager
def inside(call, waits):
    """A thread that is inside ``call``."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert waits.begun.wait(30)
        yield thread
    finally:
        waits.let.set()
        thread.join()
