"""Steps that one compiled call builds are those of the longer way, and whatever it does not know goes that way."""

import gc
import weakref

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import BLOCK, MODEL_LEN, as_on_a_device, int32
from builder.adopted.test_adopted_captures import PersistentBuffers, backend_of, steps_of
from builder.plain_backend import Least, config

from attncore import AdoptedSteps, BackendSpec, MultipleOf
from attncore.builder.adopted.known_steps import NoKnownSteps
from attncore.errors import CaptureError, ConcurrentUseError
from attncore.graphs import capturing, new_graph

if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no functions for DLPack: each step is searched", allow_module_level=True)

FIELDS = ("paged_kv_indptr", "paged_kv_last_page_len", "seq_start_loc", "paged_kv_indices")
COUNTS = ("num_reqs", "num_tokens", "num_actual_reqs", "num_actual_tokens", "max_seq_len", "max_query_len", "step")


class Planning(Least):
    """Its captured sizes are planned by their graphs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.planned = []

    def plan(self, metadata):
        self.planned.append(metadata.step)

    def record_plan(self, metadata):
        return True


def planning(**more):
    facts = {"device_needs": {"paged_kv_indices"}, "cuda_graph": "uniform", "host_lengths": "exact"} | more
    spec = BackendSpec(
        name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
        block_sizes=MultipleOf(1), **facts,
    )  # fmt: skip
    return Planning(config(spec))


class Engine:
    """Buffers for the device, and new tensors of the host in each step, as vLLM's runner has them."""

    def __init__(self, size=4, *, records=True, on_device=True, **facts):
        self.buffers, self.size = PersistentBuffers(), size
        self.steps = steps_of(planning(**facts))
        if on_device:
            as_on_a_device(self.steps)
        metadata = self.build([1] * size, capturing=True)
        self.graph = new_graph("cpu")
        if records:
            with capturing(self.graph):
                metadata.record()

    def given(self, lengths):
        given = self.buffers.fill(lengths, self.size)
        hosts = {
            f"host_{name}": torch.from_numpy(given[name].numpy().copy()) for name in ("query_start_loc", "seq_lens")
        }
        return given | hosts

    def build(self, lengths, **more):
        return self.steps.build(**self.given(lengths) | more)

    def warm(self):
        for _ in range(3):
            self.build([5, 9])
        return self


@pytest.fixture
def searched(monkeypatch):
    """What was searched since: calls of the longer way."""
    calls, search = [], AdoptedSteps._searched
    monkeypatch.setattr(AdoptedSteps, "_searched", lambda self, *given: calls.append(self) or search(self, *given))
    return calls


@pytest.mark.parametrize("on_device", [False, True])
def test_a_known_step_is_that_of_the_longer_way(searched, on_device):
    quick, slow = Engine(on_device=on_device).warm(), Engine(on_device=on_device)
    slow.steps._known = NoKnownSteps()
    slow.warm()
    searched.clear()
    for lengths in ([5, 9, 2], [60], [1, 1, 1, 1], [], [7, 33, 2, 59]):
        torch.manual_seed(0)
        found = quick.build(lengths)
        torch.manual_seed(0)
        wanted = slow.build(lengths)
        assert [getattr(found, name) for name in COUNTS] == [getattr(wanted, name) for name in COUNTS]
        for name in ("query_start_loc", "seq_lens", "context_lens", "paged_kv_indptr", "logits_indices"):
            assert getattr(found.host, name).tolist() == getattr(wanted.host, name).tolist(), name
        assert (found.builder, found.use_cuda_graph, found.lengths) == (quick.steps, True, "exact")
        assert found.seq_lens.tolist() == wanted.seq_lens.tolist()
        assert set(dir(wanted)) <= set(dir(found))
    assert searched == [slow.steps] * 5


def test_a_graph_makes_page_lists_and_the_host_does_not(searched, monkeypatch):
    engine = Engine().warm()
    made, make = [], engine.steps._fields.make
    monkeypatch.setattr(engine.steps._fields, "make", lambda *given, **more: made.append(1) or make(*given, **more))
    searched.clear()
    metadata = engine.build([5, 9, 2])
    assert not made
    assert not searched
    engine.graph.replay()
    assert made == [1]
    pages = metadata.host.paged_kv_indptr.tolist()
    assert engine.steps._fields.sums(4)["paged_kv_indptr"].tolist() == pages
    wanted = torch.cat([engine.buffers.table[row, : -(-length // BLOCK)] for row, length in enumerate((5, 9, 2))])
    assert metadata.page_buffer[: pages[-1]].tolist() == wanted.tolist()
    assert engine.steps.backend.planned == [0], "the graph plans"


@pytest.mark.parametrize("ask", ["field", "settle", "record", "seq_lens"])
def test_a_step_without_its_graph_has_what_the_graph_would_make(ask):
    engine = Engine(pad_seq_len=1).warm()
    metadata = engine.build([5, 9])
    if ask == "field":
        _ = metadata.paged_kv_indptr
    elif ask == "seq_lens":
        assert metadata.seq_lens.tolist() == [5, 9, 1, 1]
    else:
        getattr(metadata, ask)()
    sums = engine.steps._fields.sums(4)
    assert sums["paged_kv_indptr"].tolist() == metadata.host.paged_kv_indptr.tolist() == [0, 2, 5, 6, 7]
    assert engine.build([60]).paged_kv_indptr[1] == 15
    metadata.settle()  # of an older step: what is there is a later one's
    assert sums["paged_kv_indptr"][1] == 15


def test_a_graph_that_records_nothing_is_planned_and_given_page_lists():
    engine = Engine(records=False).warm()
    assert engine.steps.backend.planned == [0, 1, 2, 3]
    metadata = engine.build([5, 9, 2])
    assert engine.steps._fields.sums(4)["paged_kv_indptr"].tolist() == metadata.host.paged_kv_indptr.tolist()


def test_a_field_that_is_asked_for_later_is_made_in_each_step():
    engine = Engine().warm()
    assert engine.build([5, 9]).positions.tolist() == [4, 8, 0, 0]
    for length in (6, 7, 8):
        metadata = engine.build([length, 9])
        assert engine.steps._fields.other("positions", metadata._given).tolist() == [length - 1, 8, 0, 0]


@pytest.mark.parametrize("change", ["release", "capture", "capturing"])
def test_another_capture_forgets_what_was_known(searched, change):
    engine = Engine().warm()
    if change == "capturing":
        engine.build([1] * 4, capturing=True)
    elif change == "capture":
        engine.steps.capture(2)
    else:
        engine.steps.release(4)
    searched.clear()
    metadata = engine.build([5, 9])
    assert searched
    assert metadata.use_cuda_graph is (change != "release")


WRONG = {
    "fewer starts": ({"host_query_start_loc": int32(0, 1, 2)}, "host_query_start_loc: 3 elements found beside 5"),
    "fewer lengths": ({"host_seq_lens": int32(5, 9)}, "host_seq_lens: 2 lengths found for 4 rows"),
    "falling": ({"host_query_start_loc": int32(0, 1, 0, 2, 2)}, "host_query_start_loc: row 1 begins at token 1"),
    "too long": ({"host_seq_lens": int32(5, MODEL_LEN + 1, 0, 0)}, "host_seq_lens: row 1 has 61, above max_model_len"),
    "too short": ({"host_seq_lens": int32(0, 9, 0, 0)}, "host_seq_lens: row 0 has 0 keys, fewer than its 1 token"),
    "dtype": ({"host_seq_lens": torch.ones(4)}, r"host_seq_lens: float32\[4\]"),
    "int64": ({"host_seq_lens": torch.ones(4, dtype=torch.int64)}, r"host_seq_lens: int64\[4\]"),
    "on a device": ({"host_seq_lens": torch.ones(4, dtype=torch.int32, device="meta")}, "host_seq_lens: .* on meta"),
    "list": ({"host_seq_lens": [5, 9, 0, 0]}, "host_seq_lens: list found"),
    "table on a device": ({"block_table": torch.zeros((4, 15), dtype=torch.int32, device="meta")}, "block_table: "),
    "bounds": ({"bounded": True}, "bounded: backend 'least' needs exact lengths"),
    "no flag": ({"bounded": 1}, "bounded: "),
    "negative": ({"host_seq_lens": torch._neg_view(int32(-5, -9, 0, 0))}, "host_seq_lens: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_and_changes_nothing(what):
    engine = Engine().warm()
    before, (more, words) = engine.build([5, 9, 2]), WRONG[what]
    with pytest.raises((ValueError, TypeError), match=f"^{words}"):
        engine.build([7, 9], **more)
    assert engine.steps.last_step == before.step
    assert before.host.seq_lens.tolist() == [5, 9, 2, 0]
    assert engine.build([7, 9]).max_seq_len == 9


def test_a_host_tensor_beyond_its_memory_is_not_read():
    engine = Engine().warm()
    view = torch.from_numpy(np.ones(4, np.int32))[2:]
    with pytest.raises(RuntimeError):
        view.resize_(4)
    with pytest.raises(ValueError, match=r"^host_seq_lens: shape .* reaches beyond the tensor's memory"):
        engine.build([1, 1], host_seq_lens=view)


def test_strides_and_arrays_are_read_as_they_are(searched):
    engine = Engine().warm()
    searched.clear()
    wide = torch.tensor([5, 77, 9, 77, 0, 77, 0, 77], dtype=torch.int32)
    for lengths in (wide[::2], wide.numpy()[::2], int32(5, 9, 0, 0), np.array([5, 9, 0, 0], np.int32)):
        assert engine.build([5, 9], host_seq_lens=lengths).host.seq_lens.tolist() == [5, 9, 0, 0]
    assert len(searched) == 1, "a tensor with gaps goes the longer way"


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table"])
def test_tensors_elsewhere_are_refused_by_a_captured_size(name):
    engine = Engine().warm()
    other = engine.given([5, 9])[name].clone()
    with pytest.raises(CaptureError, match=f"^{name}: it lies elsewhere than at the capture"):
        engine.build([5, 9], **{name: other})
    assert engine.build([5, 9]).num_actual_reqs == 2


def test_a_table_of_another_stride_is_refused_by_a_captured_size():
    engine = Engine().warm()
    given = engine.given([5, 9])
    given["block_table"] = torch.as_strided(engine.buffers.table, (4, 7), (8, 1))
    with pytest.raises(CaptureError, match=r"^block_table: rows of stride 8 found, .* reads them 15 apart"):
        engine.steps.build(**given)


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table", "slot_mapping"])
def test_memory_that_was_moved_is_not_taken_for_what_lies_there(searched, name):
    """torch moves memory that views share; at the address may then be another tensor, as the engine's is here."""
    engine = Engine().warm()
    kept = getattr(engine.steps._sizes.by_rows[4].kept, name)
    kept.data = torch.full_like(kept, 1)
    searched.clear()
    metadata = engine.build([7, 9])
    assert searched
    given = engine.buffers.starts if name == "query_start_loc" else getattr(metadata, name)
    assert getattr(metadata, name).data_ptr() == given.data_ptr() != kept.data_ptr()
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert metadata._given.seq_lens.tolist() == [7, 9, 0, 0]
    assert metadata.slot_mapping.tolist()[2:] == [-1, -1]


def test_buckets_and_two_engines_are_told_apart(searched):
    first, second = Engine(4).warm(), Engine(3).warm()
    searched.clear()
    for length in (5, 9, 13):
        assert first.build([length, 2]).host.seq_lens.tolist() == [length, 2, 0, 0]
        assert second.build([2, length]).host.seq_lens.tolist() == [2, length, 0]
    assert not searched


def test_eager_steps_of_padded_rows_are_known_and_planned(searched):
    engine = Engine()
    engine.steps.release(4)
    for _ in range(3):
        engine.build([5, 9])
    searched.clear()
    metadata = engine.build([6, 9])
    assert not searched
    assert (metadata.num_reqs, metadata.use_cuda_graph) == (2, False)
    assert engine.steps.backend.planned[-1] == metadata.step
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 5]
    assert engine.build([6, 9, 3]).num_reqs == 3
    assert searched, "as many rows, of which others are padding"


def test_an_error_behind_a_quick_step_leaves_its_fields():
    engine = Engine().warm()
    last = engine.build([5, 9, 2])
    engine.graph.replay()
    wanted = engine.steps._fields.sums(4)["paged_kv_indptr"].tolist()

    def fails(metadata):
        _ = metadata.paged_kv_indptr
        raise ValueError("metadata: no plan")

    engine.steps.backend.plan = fails
    other = PersistentBuffers().fill([33], 1)
    with pytest.raises(ValueError, match="no plan"):
        engine.steps.build(**other, host_query_start_loc=int32(0, 1), host_seq_lens=int32(33))
    assert engine.steps.last_step == last.step
    assert engine.steps._fields.sums(4)["paged_kv_indptr"].tolist() == wanted


def test_a_caller_inside_refuses_a_known_step():
    engine = Engine().warm()
    engine.steps.backend.plan = lambda metadata: engine.build([5, 9])
    other = PersistentBuffers().fill([33], 1)
    with pytest.raises(ConcurrentUseError):
        engine.steps.build(**other, host_query_start_loc=int32(0, 1), host_seq_lens=int32(33))
    assert engine.build([5, 9]).num_actual_reqs == 2


def test_known_steps_keep_no_steps_alive():
    engine = Engine().warm()
    gone = weakref.ref(engine.steps)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_host_arrays_of_an_older_step_do_not_overwrite_a_later_one():
    engine = Engine().warm()
    old = engine.build([5, 9, 2, 4])
    for length in (6, 7, 8):
        last = engine.build([length])
    lengths = last.host.seq_lens.tolist()
    _ = old.host.seq_lens
    assert last.host.seq_lens.tolist() == lengths == [8, 0, 0, 0]


def test_levels_without_capture_are_known_too(searched):
    steps = AdoptedSteps(
        backend_of("never"), max_num_reqs=8, max_num_tokens=64, max_model_len=MODEL_LEN, num_blocks=200
    )
    buffers = PersistentBuffers()
    for _ in range(3):
        given = buffers.fill([5, 9], 2)
        steps.build(**given)
    searched.clear()
    assert steps.build(**buffers.fill([6, 9], 2)).host.seq_lens.tolist() == [6, 9]
    assert not searched
