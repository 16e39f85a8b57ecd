"""A copy of a step of the list builder stays what it was when the step advances, and does not advance itself."""

import copy

import numpy as np
import pytest
from builder.lists.decodes import backend, decodes, fields

from attncore import CommonMetadataBuilder


def step(read, on=None):
    metadata = CommonMetadataBuilder(4, "flashinfer", backend=on).build(decodes([(4, [7, 8]), (2, [3])]))
    if read:  # what was read is kept
        fields(metadata)
        _ = metadata.decode_metadata, metadata.kept
    return metadata


@pytest.mark.parametrize("on", [None, backend()])
@pytest.mark.parametrize("read", [False, True])
def test_a_copy_stays_what_it_was(read, on):
    metadata = step(read, on)
    copied, before = copy.copy(metadata), fields(step(read))
    metadata.advance_step()
    for name, values in fields(copied).items():
        assert np.array_equal(values, before[name]), name
    assert copied.max_seq_len == copied.seq_lens.max() == copied.decode_metadata.seq_lens.max()
    assert metadata.seq_lens.max() == copied.max_seq_len + 1


def test_a_copy_does_not_advance():
    with pytest.raises(ValueError, match=r"^metadata: not as CommonMetadataBuilder.build gave it \(a copy, "):
        copy.copy(step(False)).advance_step()


def test_what_an_engine_has_set_is_in_the_copy():
    metadata = step(True)
    metadata.slot_mapping = np.array([9, 9])
    assert copy.copy(metadata).slot_mapping is metadata.slot_mapping
