"""Functions on host arrays and building blocks, fed objects that lie: equal outcomes on both implementations."""

import inspect
import os
from unittest import mock

import numpy as np
import pytest
from fuzz.budget import examples
from fuzz.hostile import fixed, integers, mostly, sequences
from fuzz.outcomes import outcome, plain
from hypothesis import given
from hypothesis import strategies as st

from attncore import builder, slots

lens = st.lists(st.integers(0, 9), min_size=2, max_size=2)
STRIDES = (
    np.array,
    np.asfortranarray,
    lambda array: np.flip(np.array(np.flip(array))),
    lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    lambda array: np.frombuffer(bytearray(b"." + array.tobytes()), array.dtype, -1, 1).reshape(array.shape),
)
"""The same elements in memory of other strides, and not aligned."""


def arrays(lists):
    strided = st.tuples(lists, st.sampled_from(STRIDES), st.sampled_from((np.int32, np.int64)))
    return lists | strided.map(lambda drawn: drawn[1](np.array(drawn[0], drawn[2])))


lengths = mostly(arrays(lens), sequences)
tables = st.lists(st.lists(st.integers(0, 60), min_size=4, max_size=4), min_size=2, max_size=2)
block_table = mostly(arrays(tables), sequences)
size = mostly(st.integers(1, 8), integers)
ARGUMENTS = {
    "block_table": block_table, "block_tables": block_table, "rows": block_table,
    "block_ids": lengths, "context_lens": lengths, "query_lens": lengths, "seq_lens": lengths, "kinds": lengths,
    "query_start_loc": mostly(lens.map(lambda values: [0, *np.cumsum(values).tolist()]), sequences),
    "swaps": mostly(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3), sequences),
    "num_blocks": mostly(st.none() | lens, sequences),
    "out": st.none().map(fixed) | sequences,
    "rule": st.none().map(fixed) | integers,
    "require_uniform": mostly(st.booleans(), integers),
}  # fmt: skip
"""A strategy by the name of an argument; the others are integers."""

FUNCTIONS = (
    slots.build_slot_mapping, slots.build_positions, slots.build_page_lists, slots.build_query_start_loc,
    slots.build_logits_indices, slots.pad_block_table, builder.split_decodes_and_prefills, builder.split_three_ways,
    builder.classify_requests, builder.plan_reorder, builder.rows_after, builder.expand_blocks,
    builder.kernel_blocks_per_block, builder.slice_by_requests, builder.slice_by_tokens, builder.context_chunks,
    builder.count_common_blocks, builder.find_shared_prefix, builder.local_attention_batches,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions(function):
    parameters = inspect.signature(function).parameters.values()
    required = {p.name: ARGUMENTS.get(p.name, size) for p in parameters if p.default is p.empty}
    optional = {p.name: ARGUMENTS.get(p.name, size) for p in parameters if p.default is not p.empty}

    @examples(25)
    @given(st.fixed_dictionaries(required, optional=optional))
    def twins(arguments):
        outcomes = []
        for kernels in ("cython", "numba"):
            with mock.patch.dict(os.environ, ATTNCORE_KERNELS=kernels):
                found = outcome(function, **{name: one() for name, one in arguments.items()})
            outcomes.append(repr(plain(found)))
        assert outcomes[0] == outcomes[1]

    twins()
