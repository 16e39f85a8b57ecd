"""Host memory that kernels write to: a caller can neither resize it, nor change the shape of what the kernels use."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attncore import AdoptedSteps, BackendConfig
from attncore.builder import InputBatch, MetadataBuilder
from attncore.builder.adopted.device_fields import MADE
from attncore.builder.device.memory import ALIGNMENT, zeros
from attncore.builder.fields import DERIVED
from attncore.reference import ReferenceBackend


@pytest.fixture
def batch(kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    batch.add_request("a", [1, 2, 3], 5)
    return batch


def bases(array):
    """The array and all that ``base`` leads to."""
    while isinstance(array, np.ndarray):
        yield array
        array = array.base


def arrays_of(metadata):
    gathered = {"paged_kv_indices", *DERIVED}  # made anew at each access, or once a step: the caller's own
    yield from (getattr(metadata.host, name) for name in metadata.host.field_names() if name not in gathered)
    yield from (getattr(metadata, name) for name in metadata.host.field_names() if name not in gathered)


def test_no_array_that_a_caller_can_reach_owns_the_memory(batch):
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)
    steps = [builder.capture(2), builder.build({"a": 3}), builder.build(bucket=2)]
    found = [batch.block_table, *(array for step in steps for array in arrays_of(step))]
    assert len(found) > 40
    for array in found:
        for base in bases(array):
            assert not base.flags.owndata
            with pytest.raises(ValueError, match="does not own its data"):
                base.resize((base.size + 1,), refcheck=False)


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_a_table_that_a_caller_reshapes_stays_what_the_batch_uses(batch):
    table = batch.block_table
    assert not table.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 9
    for array in bases(table):
        array.shape = (array.size,)
    batch.block_table.strides = (0, 4)
    batch.add_request("b", [7, 8])
    assert (batch.block_ids("a"), batch.block_ids("b")) == ([1, 2, 3], [7, 8])
    assert batch.block_table.shape == (4, 16)
    assert batch.block_table[:2, :3].tolist() == [[1, 2, 3], [7, 8, 0]]


@pytest.mark.parametrize("shape", [3, (3, 5)])
def test_zeros_are_aligned_and_the_callers_alone(shape):
    made, other = zeros(shape, np.int32), zeros(shape, np.int32)
    assert made.dtype == np.int32
    assert made.shape == np.zeros(shape).shape
    assert not made.any()
    assert made.ctypes.data % ALIGNMENT == 0
    made[...] = 1
    assert made.all()
    assert not other.any()


def test_memory_lives_as_long_as_an_array_over_it(kernels):
    batch = InputBatch(max_num_reqs=64, max_model_len=4096 * 4, block_size=4, kernels=kernels)
    batch.add_request("a", list(range(1, 1000)))
    table = batch.block_table
    del batch
    others = [np.ones((64, 4096), np.int32) for _ in range(4)]
    assert table[0, :999].tolist() == list(range(1, 1000))
    assert len(others) == 4


def test_tensors_of_steps_keep_their_memory_s_size(batch):
    """A build would write beyond it."""
    backend = ReferenceBackend(BackendConfig(2, 1, 4, "float32", 4))
    rejected = torch.zeros(4, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, backend, max_num_batched_tokens=16, transport="copy", num_rejected=rejected, decode_threshold=3
    )
    steps = [builder.build({"a": 3}), builder.capture(2)]
    tensors = [tensor for step in steps for tensor in (step.page_buffer, step.paged_kv_indices, *arrays_of(step))]
    found = [rejected, *(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))]
    assert len(found) > 20
    for tensor in found:
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(4)
    assert builder.build(overlapped=True).seq_lens.tolist() == [9]


def test_tensors_of_adopted_steps_keep_theirs():
    backend = ReferenceBackend(BackendConfig(2, 1, 4, "float32", 4))
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=16, max_model_len=64, num_blocks=16)
    own = {"query_start_loc": [0, 1, 3], "seq_lens": [5, 7], "block_table": [[1, 2], [3, 4]]}
    given = {name: torch.tensor(values, dtype=torch.int32) for name, values in own.items()}
    step = steps.build(**given, slot_mapping=torch.tensor([8, 13, 14]))
    for name in (*sorted(MADE), "page_buffer"):
        with pytest.raises(RuntimeError, match="not resizable"):
            getattr(step, name).untyped_storage().resize_(4)


def test_tensors_of_a_layer_keep_theirs():
    config = BackendConfig(2, 1, 4, "float32", 4, kv_cache_dtype="fp8_e4m3")
    one = torch.ones(1)
    for sinks in ([0.0, 1.0], torch.zeros(2)):
        layer = ReferenceBackend(config).impl("layers.0", scale=1.0, k_scale=one, v_scale=one, sinks=sinks)
        for tensor in (layer.k_scale, layer.v_scale, layer.sinks):
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.untyped_storage().resize_(0)
        layer.set_scales(one, one)
        layer.set_sinks([1.0, 2.0])
    one.untyped_storage().resize_(64)  # the caller's own is the caller's


def test_a_layer_is_made_where_tensors_have_no_memory():
    backend = ReferenceBackend(BackendConfig(2, 1, 4, "float32", 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert len(backend.impl("layers.0", scale=1.0, sinks=[0.0, 1.0]).sinks) == 2
