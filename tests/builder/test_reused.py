"""What a caller does to a step's objects does not reach later steps, which use the same objects."""

import copy

import numpy as np
import pytest
from builder.device.arena_batches import two_requests
from builder.test_read_only import arrays_of, bases, reference, with_views

from attncore.builder import CommonMetadataBuilder, MetadataBuilder, Sequence, SequenceGroup, metadata_from_fields
from attncore.builder.lists.capture_state import CommonAttentionState

FIELDS = "slot_mapping", "seq_lens", "query_start_loc", "block_table", "paged_kv_indptr", "paged_kv_indices"


def persistent_steps(kernels, count=5):
    """Steps of one size, in turn eager and padded, of a builder whose arenas hold one step each."""
    builder = MetadataBuilder(two_requests(kernels), max_num_batched_tokens=32, depth=1)
    builder.register_field("extra", np.int32, "request", lambda metadata, out: out.fill(metadata.step))
    yield builder.capture(4)
    for index in range(count):
        yield builder.build(bucket=4 if index % 2 else None)


def list_steps(_, count=3):
    """Steps in the buffers of a graph."""
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    state = CommonAttentionState(None, builder)
    with state.graph_capture(4):
        yield state.metadata_for_capture(2)
    for length in range(3, 3 + count):
        groups = [SequenceGroup(False, [Sequence(0, 1, length, [1, 2, 3])])]
        yield state.build(groups, state.pad_size(1))
        yield state.prepare(builder.build(groups, state.pad_size(1)))


def numbers(step):
    """What the step says, by owner and name."""
    fields = list(arrays_of(step)) + [(name, getattr(step, name)) for name in ("num_reqs", "max_seq_len")]
    return [(name, np.asarray(value).tolist()) for name, value in fields]


def reshape(step):
    for one in with_views([step]):
        for _, shown in arrays_of(one):
            for array in bases(shown):
                array.shape = (*array.shape, 1)
                array.dtype = np.int8 if array.shape[0] else array.dtype


def assign(step):
    for owner in (step, step.host):
        for name in (*FIELDS, "num_reqs", "extra", "host", "nosuch"):
            for act in (lambda o, n: setattr(o, n, np.full(3, 77)), lambda o, n: setattr(o, n, 77), delattr):
                try:
                    act(owner, name)
                except (AttributeError, ValueError, TypeError):
                    continue


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")
@pytest.mark.parametrize("harm", [reshape, assign])
@pytest.mark.parametrize("steps", [persistent_steps, list_steps])
def test_what_is_done_to_a_step_reaches_no_later_one(steps, harm, kernels):
    clean = [numbers(step) for step in steps(kernels)]
    seen = []
    for step in steps(kernels):
        seen.append(numbers(step))
        harm(step)
    assert seen == clean


@pytest.mark.parametrize("backend", [None, reference()], ids=["host", "reference"])
def test_a_field_of_a_step_cannot_be_set(kernels, backend):
    builder = MetadataBuilder(two_requests(kernels), backend, max_num_batched_tokens=32)
    builder.register_field("extra", np.int32, "request", lambda metadata, out: out.fill(3))
    step = builder.build()
    for owner in (step, step.host, builder.capture(4)):
        for name in (*FIELDS, "extra"):
            with pytest.raises(AttributeError, match=rf"^metadata(\.host)?: {name} cannot be set, for later"):
                setattr(owner, name, [1])
            with pytest.raises(AttributeError, match=rf"^metadata(\.host)?: {name} cannot be set"):
                delattr(owner, name)
    for name in ("num_reqs", "host", "groups", "req_ids", "use_cuda_graph", "forget_step", "views", "step"):
        with pytest.raises(AttributeError, match=f"^metadata: {name} cannot be set"):
            setattr(step, name, 1)
    with pytest.raises(TypeError, match="item assignment"):
        step.groups["default"] = None
    step.of_the_engine = 3
    copied = copy.copy(step)
    copied.seq_lens = [1, 2]
    copied.host = own_host = metadata_from_fields(step.asdict_zerocopy()).host
    assert (copied.seq_lens, copied.host) == ([1, 2], own_host)
    assert isinstance(copied, type(step).__mro__[1] if backend is None else type(step))
    own = metadata_from_fields(step.asdict_zerocopy())
    own.seq_lens = np.zeros(2, np.int32)
    own.host.seq_lens = np.zeros(2, np.int32)
    assert (own.seq_lens.tolist(), copy.copy(step).of_the_engine) == ([0, 0], 3)


def test_a_misspelt_field_is_refused_with_the_field_that_was_meant():
    metadata = MetadataBuilder(two_requests("cython"), max_num_batched_tokens=32).build()
    with pytest.raises(AttributeError, match=r"metadata: no field 'num_tokns'; did you mean num_tokens\?"):
        metadata.num_tokns = 3
    with pytest.raises(AttributeError, match=r"metadata\.host: no field 'seq_len'; did you mean seq_lens\?"):
        metadata.host.seq_len = 3
    metadata.mine = 3  # an engine's own
    del metadata.mine
    mine = copy.copy(metadata)
    mine.num_tokns = 3  # a copy is the caller's
    with pytest.raises(AttributeError, match=r"metadata\.host: seq_lens cannot be set.*metadata_from_fields"):
        mine.host.seq_lens = 3
