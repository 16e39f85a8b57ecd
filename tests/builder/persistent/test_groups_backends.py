"""Several KV-cache groups with the persistent builder: the backend of each, its plan, and ranks that do not fit."""

import pytest
from builder.persistent.group_batches import CROSS, FULL, WINDOW, batch_of
from builder.plain_backend import Plain, config

from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder


class Planning(Plain):
    name = "planning"

    def plan_layers(self, metadata, key):
        self.planned = metadata.group, metadata.paged_kv_indices.tolist()


def planning():
    backend = Planning(config())
    backend.impl("layer", scale=1.0)
    return backend


def test_each_group_is_planned_with_its_own_pages(kernels):
    batch = batch_of(kernels, FULL, WINDOW)
    batch.add_request("a", {"full": [1, 2], "window": [3, 4]}, 5)
    backends = {"full": planning(), "window": planning()}
    MetadataBuilder(batch, backends, max_num_batched_tokens=8).build()
    assert backends["full"].planned == ("full", [1, 2])
    assert backends["window"].planned == ("window", [3, 4])


def bad_builders():
    one, plain = planning(), Plain(config())
    two = {"full": plain, "window": plain}
    ranks = ContextParallel(2, 0, 2)
    return [
        ({"backend": {"full": plain}}, "backend: none for group 'window'"),
        ({"backend": two | {"other": plain}}, "backend: 'other' is no group of the batch; known: full, window"),
        ({"backend": one}, "backend: 'planning' plans, and is given for several groups"),
        ({"backend": {"full": one, "window": one}}, "backend: 'planning' plans, and is given for several groups"),
        (
            {"backend": two | {"window": Plain(config(None, 8))}},
            "batch: group 'window': its block_size 4 is not the backend",
        ),
        ({"context_parallel": ranks}, "context_parallel: group 'window' is windowed"),
        ({"context_parallel": 2}, "context_parallel: 2 is not a ContextParallel"),
        ({"decode_threshold": 0}, "decode_threshold: 0 is below 1"),
        ({"decode_threshold": 2**31}, "decode_threshold: 2147483648 does not fit int32"),
        ({"max_num_encoder_tokens": 0}, "max_num_encoder_tokens: 0 is below 1"),
    ]


@pytest.mark.parametrize("index", range(len(bad_builders())))
def test_builders_that_do_not_fit_the_batch(kernels, index):
    arguments, message = bad_builders()[index]
    with pytest.raises((ValueError, TypeError), match=message):
        MetadataBuilder(batch_of(kernels, FULL, WINDOW), max_num_batched_tokens=8, **arguments)


def test_worlds_that_do_not_divide():
    with pytest.raises(ValueError, match="world_size: 3 does not divide the virtual block of 8 tokens"):
        ContextParallel.of_virtual_blocks(8, 3, 0)
    with pytest.raises(ValueError, match="world_size: 3 does not divide tensor_parallel_size 8"):
        ContextParallel(3, 0, 4, tensor_parallel_size=8)
    batch = InputBatch(max_num_reqs=2, max_model_len=24, block_size=8)
    with pytest.raises(ValueError, match=r"blocks of 4 tokens on each of 3 ranks are virtual blocks of 12; .* has 8"):
        MetadataBuilder(batch, max_num_batched_tokens=8, context_parallel=ContextParallel(3, 0, 4))
    cross = batch_of("cython", KVCacheGroup("full", 8), CROSS._replace(block_size=8), max_encoder_len=8)
    with pytest.raises(ValueError, match="context_parallel: group 'encoder' is cross"):
        MetadataBuilder(cross, max_num_batched_tokens=8, context_parallel=ContextParallel(2, 0, 4))
