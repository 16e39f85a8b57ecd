"""Two small numbers do not take all memory or minutes, and an argument that is none of its kind is named."""

import numpy as np
import pytest
import torch

from attncore import builder, slots
from attncore.builder import Placeholder, SharedPrefix
from attncore.dense import dense_attention

MOST = 2**31 - 1
CALLS = {
    "kernel_blocks": lambda: builder.expand_blocks([0], MOST),
    "num_slices": lambda: builder.slice_by_tokens([MOST], MOST),
    "num_rows": lambda: builder.rows_after([], MOST),
    "context_lens": lambda: builder.context_chunks([[0]], [MOST], MOST, MOST),
    "query_lens": lambda: builder.plan_cascade(SharedPrefix(np.array([0]), 1, 1), [[0]], [MOST - 1], [MOST]),
    "placeholders": lambda: builder.placeholder_map([[Placeholder(0, 0, MOST)]], [0], [MOST]),
    "seq_len": lambda: builder.ContextParallel(1, 0, 1).positions(MOST),
    "query_lens: ": lambda: slots.build_slot_mapping([[0]], [0], [MOST], MOST),
    "query_lens: 2147483647 tokens": lambda: slots.build_positions([0], [MOST]),
    "seq_len: ": lambda: slots.compute_slot_mapping(True, [], 0, MOST, 0, 0, 1, {}),
    "width": lambda: slots.pad_block_table([[0]], MOST),
    "query": lambda: dense_attention(*[torch.zeros(1, 1, 1).expand(2**20, 1, 1)] * 3, scale=1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_two_small_numbers_are_refused_before_an_array_is_made(name):
    with pytest.raises(ValueError, match=rf"^{name}.* (exceeds|more than|at most) \d+"):
        CALLS[name]()


def test_no_ids_take_no_time():
    assert builder.expand_blocks([], MOST).shape == (0,)


@pytest.mark.parametrize("kernel_blocks", [8, 9, 100])
def test_many_kernel_blocks_a_block(kernel_blocks):
    found = builder.expand_blocks([[2, 0], [1, 3]], kernel_blocks)
    one = np.arange(kernel_blocks)
    assert found.tolist() == [[*(2 * kernel_blocks + one), *one], [*(kernel_blocks + one), *(3 * kernel_blocks + one)]]


WRONG = {
    "shared: NoneType": lambda: builder.plan_cascade(None, [[0]], [1], [1]),
    "metadata: NoneType": lambda: builder.ContextParallel(1, 0, 1).metadata(None),
    "metadata: int": lambda: builder.token_counts(5, "decoder"),
    "placeholders: NoneType": lambda: builder.placeholder_map(None, [0], [1]),
    "metadata: str": lambda: builder.slice_metadata("a", None),
    "metadata: list": lambda: builder.local_attention_metadata([], 4, 4),
    "metadata: dict": lambda: builder.new_tokens_metadata({}),
    "metadata: tuple": lambda: builder.context_chunk_metadata((), None, 0),
}


@pytest.mark.parametrize("start", WRONG)
def test_what_is_no_metadata_is_named(start):
    with pytest.raises(TypeError, match=f"^{start} "):
        WRONG[start]()


@pytest.mark.parametrize("cap", ["x", 0.0, float("inf")])
def test_a_soft_cap_that_is_no_number_is_named(cap):
    with pytest.raises(ValueError, match=r"^logits_soft_cap: .* is not a positive number"):
        dense_attention(*[torch.zeros(2, 1, 1)] * 3, scale=1.0, logits_soft_cap=cap)
