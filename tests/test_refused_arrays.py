"""Arrays that NumPy, Python or torch read as other numbers than they are, at every door: an error names the argument.

Values that a mask hides, bytes, records, and tensors that torch refuses to convert with an error of its own.
"""

from collections import deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from builder.plain_backend import Least, config
from fuzz.outcomes import NAMED

from attncore import builder, slots
from attncore.reference.cache import copy_blocks

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")

LENS, TABLE = [1, 2], [[1, 2], [3, 4]]
RANKS = builder.ContextParallel(2, 0, 4)
DOORS = {
    slots.build_query_start_loc: {"query_lens": LENS},
    slots.build_slot_mapping: {"block_table": TABLE, "context_lens": LENS, "query_lens": LENS, "block_size": 4},
    slots.build_positions: {"context_lens": LENS, "query_lens": LENS},
    slots.build_logits_indices: {"query_start_loc": [0, 1]},
    slots.build_page_lists: {"block_table": TABLE, "seq_lens": LENS, "block_size": 4},
    builder.split_decodes_and_prefills: {"query_lens": LENS},
    builder.split_three_ways: {"query_lens": LENS, "context_lens": LENS},
    builder.classify_requests: {"query_lens": LENS, "context_lens": LENS},
    builder.reorder_batch: {"query_lens": LENS, "context_lens": LENS},
    builder.plan_reorder: {"kinds": LENS},
    builder.rows_after: {"swaps": [[0, 1]], "num_rows": 2},
    builder.slice_by_requests: {"query_lens": LENS, "num_slices": 2},
    builder.slice_by_tokens: {"query_lens": LENS, "num_slices": 2},
    builder.context_chunks: {"block_table": TABLE, "context_lens": LENS, "block_size": 4, "workspace_tokens": 8},
    builder.count_common_blocks: {"block_table": TABLE, "context_lens": LENS, "block_size": 4},
    builder.find_shared_prefix: {"block_table": TABLE, "context_lens": LENS, "block_size": 4},
    builder.local_attention_batches: {
        "query_lens": LENS, "seq_lens": LENS, "block_table": TABLE, "chunk_size": 4, "block_size": 4},
    builder.expand_blocks: {"block_ids": LENS, "kernel_blocks": 2},
    builder.placeholder_map: {"placeholders": [[], []], "context_lens": LENS, "query_lens": LENS},
    RANKS.slot_mapping: {"block_table": TABLE, "context_lens": LENS, "query_lens": LENS},
    RANKS.local_slots: {"slot_mapping": LENS},
    RANKS.seq_lens: {"seq_lens": LENS},
    RANKS.block_table: {"block_table": TABLE, "seq_lens": LENS},
    RANKS.page_lists: {"block_table": TABLE, "seq_lens": LENS},
}  # fmt: skip
"""Functions that read arrays of numbers, with arguments that they take: each list of them is a door."""


def masked(good):
    return np.ma.array(good, mask=np.arange(np.size(good)).reshape(np.shape(good)) == 1)


class GivesMasked:
    """An array by ``__array__``, which has a mask."""

    def __init__(self, good):
        self.good = good

    def __array__(self, dtype=None, copy=None):
        return masked(self.good)


BAD = {
    "masked": masked,
    "masked, of objects": lambda good: masked(np.array(good, object)),
    "masked, in a list": lambda good: [masked(np.ravel(good)), masked(np.ravel(good))],
    "masked, by __array__": GivesMasked,
    "masked alone": lambda good: np.ma.masked,
    "bytes": lambda good: b"\1\2",
    "bytearray": lambda good: bytearray(b"\1\2"),
    "memoryview": lambda good: memoryview(b"\1\2"),
    "memoryview, in a list": lambda good: [memoryview(b"\1\2"), memoryview(b"\1\2")],
    "set": lambda good: {1, 2},
    "frozenset": lambda good: frozenset({1, 2}),
    "dict": lambda good: {1: 5, 2: 6},
    "mapping": lambda good: MappingProxyType({1: 5, 2: 6}),
    "record": lambda good: np.zeros(2, [("a", "i4"), ("b", "i4")]),
    "requires a gradient": lambda good: torch.tensor(good, dtype=torch.float32, requires_grad=True),
    "in a list": lambda good: [torch.tensor(good, dtype=torch.float32, requires_grad=True)],
    "nested": lambda good: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])]),
    "sparse": lambda good: torch.tensor(good).to_sparse(),
}


def refused(call, *given, **named):
    """Calls, and checks that what is raised names an argument."""
    with pytest.raises((TypeError, ValueError), match=NAMED) as raised:
        call(*given, **named)
    return str(raised.value)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("function", DOORS, ids=lambda function: function.__name__)
def test_arrays_of_numbers(function, bad):
    good = DOORS[function]
    function(**good)
    for name, value in good.items():
        if isinstance(value, list) and name != "placeholders":
            assert refused(function, **good | {name: BAD[bad](value)}).startswith(f"{name}: ")


def sequence(ids, kernels):
    group = builder.SequenceGroup(False, [builder.Sequence(7, 1, 3, ids)])
    return builder.CommonMetadataBuilder(4, kernels=kernels).build([group])


def crossed(ids, kernels):
    made = builder.CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    return made.build([builder.SequenceGroup(False, [builder.Sequence(1, 1, 3, [5, 6])], False, 5, ids)])


def batch(kernels):
    return builder.InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels)


def appended(ids, kernels):
    made = batch(kernels)
    made.add_request("a", [5])
    made.append_blocks("a", ids)


IDS = {
    "add_request": lambda ids, kernels: batch(kernels).add_request("a", ids),
    "append_blocks": appended,
    "Sequence": sequence,
    "cross_block_table": crossed,
}


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@pytest.mark.parametrize("bad", [name for name in BAD if name != "masked, by __array__"])
@pytest.mark.parametrize("door", IDS)
def test_block_ids(door, bad, kernels):
    IDS[door]([1, 2], kernels)
    refused(IDS[door], BAD[bad]([1, 2]), kernels)
    if bad == "record":
        refused(IDS[door], BAD[bad]([1, 2])[0], kernels)


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@pytest.mark.parametrize("door", IDS)
def test_ids_that_are_in_order_need_not_be_a_list(door, kernels):
    """The keys of a dict are in the order in which they were given."""
    for ids in (range(6, 8), {6: None, 7: None}.keys(), {"a": 6, "b": 7}.values(), deque([6, 7])):
        IDS[door](ids, kernels)


@pytest.mark.parametrize("kernels", ["cython", "numba"])
@pytest.mark.parametrize("bad", [name for name in BAD if name != "masked, by __array__"])
def test_rows_of_a_table(bad, kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    assert refused(slots.pad_block_table, [[1, 2], BAD[bad]([1, 2])]).startswith("rows: row 1: ")
    refused(slots.pad_block_table, BAD[bad]([1, 2]))


def test_an_array_whose_mask_hides_nothing_is_taken():
    assert slots.build_query_start_loc(np.ma.array([1, 2])).tolist() == [0, 1, 3]
    assert slots.pad_block_table([np.ma.array([1, 2], mask=[0, 0])]).tolist() == [[1, 2]]


def test_pairs_of_blocks_to_copy():
    cache = torch.zeros(2, 4, 4, 1, 8)
    refused(copy_blocks, [cache], masked([[0, 1]]))


def test_the_sampled_tokens_of_an_advance():
    metadata = sequence([1, 2], None)
    before = metadata.host.seq_lens.tolist()
    refused(builder.advance_step, metadata, np.zeros(1, np.int64), np.ma.array([5], mask=[1]))
    refused(builder.advance_step, metadata, np.ma.array([5], mask=[1]), np.zeros(1, np.int64))
    assert metadata.host.seq_lens.tolist() == before


def test_an_error_of_the_callers_own_object_is_its_own():
    class Fails:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        slots.build_query_start_loc(Fails())


@pytest.mark.parametrize("dtype", [None, "no dtype", "i4,(", object(), 5])
def test_a_dtype_that_is_none(dtype):
    steps = builder.MetadataBuilder(batch(None), Least(config()), max_num_batched_tokens=8)
    with pytest.raises(TypeError, match=r"^dtype: "):
        steps.register_field("n", dtype, "token", print)
