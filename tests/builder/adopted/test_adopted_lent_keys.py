"""Keys that padded rows of captured sizes are lent: whatever reads lengths on the device finds those of its step."""

import pytest
from builder.adopted.adopted_engine import as_on_a_device
from builder.adopted.test_adopted_captures import PersistentBuffers, backend_of, steps_of
from builder.plain_backend import Least

from attncore.graphs import capturing, new_graph

LENGTHS = ["seq_lens", "context_lens", "positions", "paged_kv_indptr", "paged_kv_last_page_len", "seq_start_loc"]
STEPS = [5, 9], [7, 33, 2], [60], [3, 3, 3, 3]


class Planning(Least):
    """Its plan calls ``planned`` with the metadata."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.planned = lambda metadata: None

    def plan(self, metadata):
        self.planned(metadata)


class Engine:
    """Buffers on a device, and a backend that lends one key to each padded row."""

    def __init__(self, *, plans=False, kernels=None):
        self.buffers, backend = PersistentBuffers(), backend_of(pad_seq_len=1)
        self.backend = Planning(backend.config) if plans else backend
        self.steps = steps_of(self.backend, kernels=kernels)
        as_on_a_device(self.steps)

    def build(self, lengths, buffers=None, size=4, **more):
        given = (buffers or self.buffers).fill(lengths, size)
        hosts = {f"host_{name}": given[name].clone() for name in ("query_start_loc", "seq_lens")}
        return self.steps.build(**given | hosts | more)


def host_of(metadata, name):
    return getattr(metadata.host, name).tolist()


@pytest.mark.parametrize("name", LENGTHS)
def test_a_plan_reads_the_lengths_of_its_step(kernels, name):
    engine, seen = Engine(plans=True, kernels=kernels), []
    engine.build([1] * 4, capturing=True)
    engine.backend.planned = lambda metadata: seen.append(getattr(metadata, name).tolist())
    for lengths in STEPS * 2:
        metadata = engine.build(lengths)
        assert metadata.use_cuda_graph
        assert seen.pop() == host_of(metadata, name) == getattr(metadata, name).tolist()


def test_a_plan_that_fails_without_reading_lengths_leaves_those_of_the_last_step():
    engine = Engine(plans=True)
    engine.build([1] * 4, capturing=True)
    metadata = engine.build([5, 9])

    def fails(_):
        raise ValueError("metadata: no plan")

    engine.backend.planned = fails
    with pytest.raises(ValueError, match="no plan"):
        engine.build([7, 33, 2])
    assert metadata.seq_lens.tolist() == [5, 9, 1, 1]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("how", ["asked for", "record"])
def test_a_field_that_the_graph_does_not_make_is_made_of_lent_keys(kernels, name, how):
    """The graph was captured before anything asked for the field, and this step is run without it."""
    engine = Engine(kernels=kernels)
    metadata = engine.build([1] * 4, capturing=True)
    with capturing(new_graph("cpu")):
        metadata.record()
    _ = getattr(engine.build([60, 60]), name)
    for lengths in STEPS * 2:
        metadata = engine.build(lengths)
        if how == "record":
            metadata.record()
        assert getattr(metadata, name).tolist() == host_of(metadata, name)


def test_a_failed_build_of_as_many_rows_leaves_the_last_steps_lengths_where_they_are_read(monkeypatch):
    engine, other = Engine(), PersistentBuffers()
    metadata = engine.build([1] * 4, capturing=True)
    with capturing(new_graph("cpu")):
        metadata.record()
    for _ in range(3):
        metadata = engine.build([5, 9])

    def fails(*given, **more):
        raise MemoryError

    monkeypatch.setattr(engine.steps._fields, "make_rest", fails)
    with pytest.raises(MemoryError):  # an eager step: it has a slot more than the captured size
        engine.build([33, 33, 33, 33], other, slot_mapping=other.slots[:5])
    assert metadata.seq_lens.tolist() == [5, 9, 1, 1]
