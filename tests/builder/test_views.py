"""Views of a step: what they read of the host arrays, and that those on a device follow the table of fields."""

import numpy as np
import pytest
from builder.device.arena_batches import two_requests

from attncore.builder import MetadataBuilder, device_slices
from attncore.builder.fields import FIELDS, Rebase
from attncore.builder.slices import HostArrays, slice_host


class Counting(HostArrays):
    """Host arrays that keep the names of arrays which were asked for and are not there."""

    def __init__(self, **arrays):
        super().__init__(**arrays)
        vars(self)["missing"] = []

    def _memory(self, name):
        array = self._own(name)
        if array is None:
            self.missing.append(name)
        return array


def test_a_view_of_a_step_without_an_encoder_asks_for_none_of_its_arrays(kernels):
    host = MetadataBuilder(two_requests(kernels), max_num_batched_tokens=32).build({"a": 3}).host
    names = [name for name in FIELDS if name != "paged_kv_num_pages" and hasattr(host, name)]
    whole = Counting(**{name: getattr(host, name) for name in names})
    view, counts = slice_host(whole, 1, 2, 1, 4)
    assert view.seq_lens.tolist() == [6]
    assert not counts
    # Asked for by name, of each kind.
    assert whole.missing == ["encoder_seq_lens", "tree_mask", "span_ends"]


@pytest.mark.parametrize("name", ["query_start_loc", "seq_start_loc"])
def test_a_view_on_a_device_rebases_as_the_table_says(monkeypatch, kernels, name):
    made = MetadataBuilder(two_requests(kernels), max_num_batched_tokens=32, transport="copy")
    step = made.build({"a": 3})
    first = step.num_decodes
    whole = np.asarray(getattr(step, name))[first:]
    assert isinstance(step.prefill_metadata, device_slices.DeviceView)
    assert whole[0] > 0
    rebased = step._view(first, step.num_reqs, step.num_decode_tokens, step.num_tokens)
    assert getattr(rebased, name).tolist() == (whole - whole[0]).tolist()
    monkeypatch.setitem(FIELDS, name, FIELDS[name]._replace(rebase=Rebase.NOTHING))
    as_it_is = step._view(first, step.num_reqs, step.num_decode_tokens, step.num_tokens)
    assert getattr(as_it_is, name).tolist() == whole.tolist()
