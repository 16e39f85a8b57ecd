"""A batch of two requests, and a backend that does nothing, for the tests of arenas."""

from builder.plain_backend import Least, config

from attncore.builder import InputBatch

CONFIG = config()


class Backend(Least):
    name = "late"


def two_requests(kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    batch.add_request("a", range(1, 9), 3)
    batch.add_request("b", range(9, 17), 6)
    return batch
