"""The short way of a steady step: its arguments are checked as those of any step, and it lets nobody in between."""

from types import MappingProxyType

import numpy as np
import pytest

from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError


@pytest.fixture
def batch(kernels):
    return InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)


@pytest.fixture(params=["direct", "sent", "filled"])
def steady(request, batch):
    """A builder whose next step is a steady one, with a captured size."""
    transport = "copy" if request.param == "sent" else "auto"
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, transport=transport)
    if request.param == "filled":
        builder.register_field("x", "int32", "request", lambda metadata, out: None)
    builder.capture(2)
    batch.add_request("b", list(range(1, 17)), 4)
    builder.build()
    return builder


@pytest.mark.parametrize("bucket", [None, 2])
@pytest.mark.parametrize("query_len", [True, 1.0, np.float64(1), np.True_, None, "1"])
def test_a_query_len_that_is_no_integer(batch, steady, query_len, bucket):
    with pytest.raises(TypeError, match=r"^query_len: .* is not an integer"):
        steady.build(query_len=query_len, bucket=bucket)
    assert (batch.num_computed_tokens("b"), steady.last_step) == (5, 1)


@pytest.mark.parametrize("bucket", [None, 2])
@pytest.mark.parametrize("scheduled", [None, [], (), 0, "", False, set()])
def test_scheduled_that_is_no_mapping(batch, steady, scheduled, bucket):
    with pytest.raises(TypeError, match=r"^scheduled: .* is not a mapping of request to tokens"):
        steady.build(scheduled, bucket=bucket)
    assert (batch.num_computed_tokens("b"), steady.last_step) == (5, 1)


@pytest.mark.parametrize("query_len", [1, np.int64(1)])
@pytest.mark.parametrize("scheduled", [{}, MappingProxyType({})])
def test_empty_mappings_run_one_token_of_each(batch, steady, scheduled, query_len):
    assert steady.build(scheduled, query_len=query_len).seq_lens.tolist() == [6]


class Dying:
    """A name whose last reference is let go by the step that no longer has it; ``then`` is called by that."""

    def __init__(self, then):
        self.then = then

    def __del__(self):
        self.then()


@pytest.mark.parametrize("bucket", [None, 4])
def test_a_removed_requests_name_that_builds_when_it_is_let_go(batch, bucket):
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, depth=2)
    builder.capture(4)
    refused = []

    def build():
        try:
            builder.build({"b": 3})
        except ConcurrentUseError as error:
            refused.append(error)

    batch.add_request("b", list(range(1, 17)), 4)
    name = Dying(build)
    batch.add_request(name, [17, 18, 19, 20], 4)
    for _ in range(2):
        builder.build(bucket=bucket)
    batch.remove_request(name)
    del name
    for computed in range(6, 10):
        step = builder.build(bucket=bucket)
        assert (step.seq_lens[0], step.step) == (computed + 1, builder.last_step)
        assert step.seq_lens.tolist() == step.host.seq_lens.tolist()
    assert len(refused) == 1
