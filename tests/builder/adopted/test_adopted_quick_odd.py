"""Known steps beside those of the longer way: what is shown of them, and host arrays that compiled code cannot read."""

import numpy as np
import pytest
import torch
from builder.adopted.test_adopted_quick import Engine
from torch.utils._python_dispatch import TorchDispatchMode

from attncore import AdoptedSteps, BackendConfig
from attncore.builder.adopted.known_steps import NoKnownSteps
from attncore.reference import ReferenceBackend


def lengths_of_records(lengths):
    """Lengths side by side with others of two bytes: every second one lies at no address of a whole number."""
    records = np.zeros(len(lengths), [("length", np.int32), ("other", np.int16)])
    records["length"] = lengths
    return records["length"]


UNREADABLE = {
    "sparse": lambda lengths: torch.from_numpy(lengths).to_sparse(),
    "a field of records": lengths_of_records,
}


@pytest.mark.parametrize(
    "name", ["query_start_loc", "seq_lens", "block_table", "slot_mapping", "host_query_start_loc", "host_seq_lens"]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # once a process
def test_a_nested_tensor_is_refused_by_its_name(name):
    nested = torch.nested.nested_tensor([torch.ones(4, dtype=torch.int32)] * 2)
    with pytest.raises(ValueError, match=f"^{name}: nested int32 on cpu found"):
        Engine().warm().build([5, 9], **{name: nested})


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_compiled_code_cannot_read_is_refused_as_elsewhere(what):
    engine = Engine().warm()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^host_seq_lens: int32\[4\]"):
            engine.build([5, 9], host_seq_lens=UNREADABLE[what](np.array([5, 9, 0, 0], np.int32)))
    assert engine.build([5, 9]).max_seq_len == 9


def test_a_known_step_is_shown_as_others_are():
    engine, slow = Engine().warm(), Engine()
    slow.steps._known = NoKnownSteps()
    slow.warm()
    pairs = [(engine.build([length, 9]), slow.build([length, 9])) for length in (5, 6, 7, 8)]
    for found, other in pairs:
        assert repr(found) == repr(other)
    assert "STALE" in repr(pairs[0][0])
    assert "tensors on cpu" in repr(pairs[-1][0])


class AsksOnce(TorchDispatchMode):
    """Asks for a field of a step in the first operation of torch."""

    def __init__(self, metadata):
        super().__init__()
        self.metadata = metadata

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        metadata, self.metadata = self.metadata, None
        if metadata is not None:
            _ = metadata.paged_kv_indices
        return function(*args, **kwargs or {})


def test_a_field_that_is_first_asked_for_while_the_next_step_is_built_is_that_step_s():
    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", block_size=4))
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=8, max_model_len=32, num_blocks=16)
    given = {
        "query_start_loc": torch.arange(3, dtype=torch.int32), "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
        "block_table": torch.ones(2, 8, dtype=torch.int32), "slot_mapping": torch.tensor([4, 8]),
    }  # fmt: skip
    last = [steps.build(**given) for _ in range(3)][-1]
    given["seq_lens"].copy_(torch.tensor([6, 17]))
    with AsksOnce(last):
        metadata = steps.build(**given)
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 7]
    assert metadata.paged_kv_indices.tolist() == [1] * 7
