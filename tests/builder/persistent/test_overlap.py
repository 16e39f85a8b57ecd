"""Steps built while the last one runs: bounds on the host, exact lengths on the device."""

import numpy as np
import pytest
import torch
from late_verdicts import drafts_judged_late

from attncore.builder import ContextParallel, InputBatch, MetadataBuilder


@pytest.mark.parametrize("seed", range(6))
def test_the_device_knows_exact_lengths(kernels, seed):
    drafts_judged_late(kernels, seed)


def test_without_num_rejected_nothing_overlaps():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    batch.add_request("a", [1, 2], 3)
    with pytest.raises(ValueError, match="overlapped: this builder was made without num_rejected"):
        builder.build(overlapped=True)
    assert batch.num_computed_tokens("a") == 3


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (np.zeros(2, np.int32), {}, r"num_rejected: int32\[2\] found; give a torch int32 tensor"),
        (torch.zeros(3, dtype=torch.int32), {}, r"num_rejected: torch.int32\[3\] found"),
        (torch.zeros(2, dtype=torch.int64), {}, r"num_rejected: torch.int64\[2\] found"),
        (torch.zeros(2, dtype=torch.int32), {"transport": "auto"}, "num_rejected: steps are read where they are built"),
        (
            torch.zeros(2, dtype=torch.int32),
            {"context_parallel": ContextParallel(2, 0, 2)},
            "num_rejected: not with context_parallel",
        ),
    ],
)
def test_what_overlapping_needs(given, options, message):
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    with pytest.raises(ValueError, match=message):
        MetadataBuilder(batch, max_num_batched_tokens=8, num_rejected=given, **{"transport": "copy"} | options)


def test_an_empty_step_has_exact_lengths_whatever_the_build_before_it_was():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    num_rejected = torch.zeros(2, dtype=torch.int32)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy", num_rejected=num_rejected)
    builder.capture(2)
    batch.add_request("a", [1], 3)
    assert builder.host_lengths(builder.build(overlapped=True)) == "bounded"
    with pytest.raises(ValueError, match="request 'a'"):
        builder.build(overlapped=True)  # no block
    assert builder.host_lengths(builder.build_empty(2)) == "exact"
