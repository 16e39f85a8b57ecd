"""Under ATTNCORE_POISON=1, host arrays of an adopted step that are read too late raise."""

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import MODEL_LEN, int32, reference

from attncore import AdoptedSteps
from attncore.errors import AttncoreError

LARGEST = {"max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": MODEL_LEN, "num_blocks": 200}


def step(steps, *lengths):
    """A step of decodes of these lengths."""
    n = len(lengths)
    table = torch.arange(1, 15 * n + 1, dtype=torch.int32).view(n, 15)
    starts = torch.arange(n + 1, dtype=torch.int32)
    return steps.build(
        query_start_loc=starts, seq_lens=int32(*lengths), block_table=table, slot_mapping=torch.arange(n)
    )


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    return AdoptedSteps(reference(), **LARGEST, depth=2)


@pytest.mark.parametrize("asked_before", [True, False])
@pytest.mark.parametrize("name", ["seq_lens", "query_start_loc", "positions", "paged_kv_indices", "paged_kv_num_pages"])
def test_late_access_raises(poisoned, name, asked_before):
    first = step(poisoned, 5, 9)
    wanted = getattr(first.host, name).tolist() if asked_before else None
    step(poisoned, 6, 10)
    if asked_before:
        assert getattr(first.host, name).tolist() == wanted
    with pytest.raises(ValueError, match="host_seq_lens"):  # a refused step is none
        step(poisoned, MODEL_LEN + 1)
    getattr(first.host, name)
    step(poisoned, 7, 11)
    with pytest.raises(AttncoreError, match=f"metadata: step 0 was asked for host.{name} after step 2 was built"):
        getattr(first.host, name)


def test_a_view_of_an_expired_step_is_not_taken(poisoned):
    first = step(poisoned, 5, 9)
    for length in (6, 7):
        step(poisoned, length)
    with pytest.raises(AttncoreError, match="metadata: step 0 was asked for host"):
        _ = first.decode_metadata
    assert "STALE" in repr(first)


def test_names_that_are_no_field_are_attribute_errors(poisoned):
    first = step(poisoned, 5)
    for _ in range(3):
        step(poisoned, 6)
        assert not hasattr(first.host, "__array__")
        assert not hasattr(first.host, "_nothing")


def test_without_it_nothing_raises():
    steps = AdoptedSteps(reference(), **LARGEST, depth=1)
    first = step(steps, 5)
    for length in (6, 7):
        step(steps, length)
    assert len(first.host.seq_lens) == 1


def test_the_hosts_arrays_are_those_of_the_step_when_first_asked_for_later():
    steps = AdoptedSteps(reference(), **LARGEST, depth=3)
    metadata = [step(steps, 5 + number, 9) for number in range(3)]
    for number, one in enumerate(metadata):
        assert one.host.seq_lens.tolist() == [5 + number, 9]
        assert one.host is one.host
        assert isinstance(one.host.block_table, np.ndarray)
