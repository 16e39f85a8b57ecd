"""Captured sizes of adopted steps, with an engine's own padding: length 0, slot -1, row 0 of the table."""

from types import SimpleNamespace

import pytest
import torch
from builder.adopted.adopted_engine import BLOCK, MODEL_LEN, int32, reference
from builder.plain_backend import Least, config

from attncore import AdoptedSteps, BackendSpec, MultipleOf
from attncore.errors import CaptureError
from attncore.graphs import capturing, launch, new_graph

COLUMNS = MODEL_LEN // BLOCK
READ = (
    "paged_kv_indptr", "paged_kv_last_page_len", "seq_start_loc", "query_lens", "context_lens", "logits_indices",
    "token_to_req_indices", "positions", "seq_lens", "slot_mapping", "paged_kv_num_pages",
)  # fmt: skip


def backend_of(level="uniform", **facts):
    spec = BackendSpec(
        name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
        block_sizes=MultipleOf(1), cuda_graph=level, **facts,
    )  # fmt: skip
    return Least(config(spec))


class PersistentBuffers:
    """The tensors of an engine that captures graphs: one set, of which each step takes the beginning."""

    def __init__(self, most=8, query_len=1):
        self.starts = torch.zeros(most + 1, dtype=torch.int32)
        self.lengths = torch.zeros(most, dtype=torch.int32)
        self.table = torch.zeros((most, COLUMNS), dtype=torch.int32)
        self.slots = torch.zeros(most * query_len, dtype=torch.int64)
        self.query_len = query_len

    def fill(self, lengths, size):
        """A step of decodes, padded to ``size`` rows as engines pad."""
        n, query_len = len(lengths), self.query_len
        self.starts[:] = n * query_len
        self.starts[: n + 1] = torch.arange(n + 1) * query_len
        self.lengths.zero_()
        self.lengths[:n] = int32(*lengths)
        self.table.zero_()
        self.table[:n] = torch.randint(1, 100, (n, COLUMNS), dtype=torch.int32)
        self.slots.fill_(-1)
        self.slots[: n * query_len] = torch.randperm(400)[: n * query_len]
        return {
            "query_start_loc": self.starts[: size + 1], "seq_lens": self.lengths[:size],
            "block_table": self.table[:size], "slot_mapping": self.slots[: size * query_len],
        }  # fmt: skip


def steps_of(backend=None, **more):
    most = {"max_num_reqs": 8, "max_num_tokens": 64, "max_model_len": MODEL_LEN, "num_blocks": 200} | more
    return AdoptedSteps(backend or backend_of(), **most)


def copied(metadata, names=READ):
    return tuple(getattr(metadata, name).clone() for name in names)


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_graph_finds_every_later_step_of_its_size(kernels, query_len):
    engine, steps = PersistentBuffers(query_len=query_len), steps_of(kernels=kernels, decode_threshold=3)
    graphs = {}
    for size in (8, 4):
        metadata = steps.build(**engine.fill([query_len] * size, size), capturing=True)
        assert (metadata.max_seq_len, metadata.max_query_len) == (MODEL_LEN, query_len)
        graph = new_graph("cpu")
        with capturing(graph):
            seen = launch(copied, metadata)
        graphs[size] = graph, seen
    assert steps.captured == (4, 8)
    generator = torch.Generator().manual_seed(0)
    for count in (3, 8, 1, 4, 5, 2, 8, 7):
        size = 4 if count <= 4 else 8
        lengths = torch.randint(query_len, MODEL_LEN + 1, (count,), generator=generator).tolist()
        metadata = steps.build(**engine.fill(lengths, size))
        assert metadata.use_cuda_graph
        assert metadata.decode_metadata is metadata
        assert (metadata.num_reqs, metadata.num_tokens) == (size, size * query_len)
        assert (metadata.num_actual_reqs, metadata.num_actual_tokens) == (count, count * query_len)
        graph, seen = graphs[size]
        graph.replay()
        for name, found in zip(READ, seen, strict=True):
            assert found.tolist() == getattr(metadata.host, name).tolist(), name
        assert metadata.host.seq_lens.tolist() == lengths + [0] * (size - count)
        assert metadata.host.context_lens.tolist() == [length - query_len for length in lengths] + [0] * (size - count)


def test_page_lists_lie_at_one_address(kernels):
    """For a backend that reads them, they are made in each step, eager or captured."""
    engine, steps = PersistentBuffers(), steps_of(backend_of(device_needs={"paged_kv_indices"}), kernels=kernels)
    buffer = steps.build(**engine.fill([1] * 4, 4), capturing=True).page_buffer
    for lengths, size in (([5, 9], 4), ([13, 2, 7], 3), ([60] * 4, 4)):
        metadata = steps.build(**engine.fill(lengths, size))
        pages = [-(-length // BLOCK) for length in lengths]
        wanted = torch.cat([engine.table[row, :count] for row, count in enumerate(pages)]).tolist()
        assert metadata.page_buffer is buffer
        assert buffer[: sum(pages)].tolist() == metadata.paged_kv_indices.tolist() == wanted
        assert metadata.paged_kv_indptr[-1] == metadata.host.paged_kv_indptr[-1] == sum(pages)


def test_a_registered_size_is_captured_over_its_first_step():
    engine, steps = PersistentBuffers(), steps_of()
    steps.capture(4)
    assert steps.build(**engine.fill([5, 9, 2], 3)).use_cuda_graph is False
    assert steps.build(**engine.fill([5, 9, 2], 4)).max_seq_len == MODEL_LEN
    metadata = steps.build(**engine.fill([5, 9, 2], 4))
    assert (metadata.use_cuda_graph, metadata.max_seq_len) == (True, 9)


def test_a_mixed_step_of_as_many_rows_is_an_eager_one():
    engine, steps = PersistentBuffers(), steps_of()
    steps.capture(4)
    tensors = engine.fill([5, 9, 12, 0], 4)
    engine.starts[:5] = int32(0, 1, 2, 4, 4)
    metadata = steps.build(**tensors)
    assert (metadata.use_cuda_graph, metadata.num_reqs, metadata.num_decodes, metadata.num_prefills) == (False, 3, 2, 1)


@pytest.mark.parametrize(
    ("level", "query_len", "in_graph"), [("uniform", 2, False), ("always", 2, True), ("always", 1, False)]
)
def test_a_row_without_tokens_ahead_of_others(kernels, level, query_len, in_graph):
    """Where each row has one token a kernel may take token i for that of row i: padded rows come last."""
    engine = PersistentBuffers(query_len=query_len)
    steps = steps_of(backend_of(level), decode_threshold=2, kernels=kernels)
    steps.build(**engine.fill([9] * 4, 4), capturing=True)
    for _ in range(3):  # the later ones are known
        given = engine.fill([9] * 3, 4)
        assert steps.build(**given).use_cuda_graph
        given["query_start_loc"][1:] = torch.tensor([1, 1, 2, 3]) * query_len
        given["seq_lens"][:] = int32(9, 0, 9, 9)
        metadata = steps.build(**given)
        assert metadata.use_cuda_graph is in_graph
        assert metadata.num_decodes + metadata.num_prefills == 4


def test_tensors_elsewhere_than_at_the_capture_are_refused():
    """The graph would read the others."""
    engine, steps = PersistentBuffers(), steps_of()
    steps.build(**engine.fill([5, 9], 2), capturing=True)
    moved = engine.fill([5, 9], 2) | {"block_table": engine.table[:2].clone()}
    before = steps.last_step
    with pytest.raises(
        CaptureError, match=r"block_table: it lies elsewhere than at the capture of 2 rows.*release\(2\)"
    ):
        steps.build(**moved)
    assert steps.last_step == before
    steps.release(2)
    assert steps.captured == ()
    assert steps.build(**moved).use_cuda_graph is False


@pytest.mark.parametrize(
    ("level", "lengths", "size", "slots", "text"),
    [
        ("never", [5, 9], 2, 2, "num_reqs: backend 'least' cannot be captured in a graph; run its steps without"),
        ("uniform_decode", [5, 9], 2, 4, "query_len: 2, but backend 'least' captures decodes of one token only"),
        ("uniform", [5, 9], 2, 8, "query_len: 4 is above decode_threshold 3; graphs hold decodes only"),
        ("uniform", [5, 9], 2, 3, "capturing: 3 slots found for 2 rows; a graph is captured over rows of one length"),
        ("uniform", [5, 9], 2, 6, "capturing: not 2 rows of 3 tokens each"),
    ],
)
def test_what_cannot_be_captured_is_refused(level, lengths, size, slots, text):
    engine, steps = PersistentBuffers(query_len=4), steps_of(backend_of(level), decode_threshold=3)
    engine.query_len = 1
    tensors = engine.fill(lengths, size) | {"slot_mapping": engine.slots[:slots]}
    with pytest.raises(ValueError, match=text):
        steps.build(**tensors, capturing=True)
    assert steps.captured == ()
    assert steps.last_step == -1


def test_sizes_beyond_the_capacity_are_refused():
    steps = steps_of(max_num_tokens=6, decode_threshold=2)
    for asked, text in (
        ((9,), "num_reqs: 9 exceed max_num_reqs 8"),
        ((4, 2), "num_reqs: 4 of 2 tokens exceed max_num_tokens 6"),
        ((0,), "num_reqs: 0 is below 1"),
    ):
        with pytest.raises(ValueError, match=text):
            steps.capture(*asked)
    steps.capture(3)
    with pytest.raises(
        ValueError, match=r"query_len: the size of 3 requests was captured with 1 token each, not 2; call release"
    ):
        steps.capture(3, 2)
    with pytest.raises(CaptureError, match=r"num_reqs: 5 was not captured \(captured: 3\)"):
        steps.release(5)
    with pytest.raises(ValueError, match="num_reqs: backend 'reference' cannot be captured in a graph"):
        steps_of(reference()).capture(4)


def test_slots_that_are_not_padded_are_refused():
    """The step would run without the graph that its rows are padded for."""
    engine, steps = PersistentBuffers(), steps_of()
    steps.capture(4)
    tensors = engine.fill([5, 9], 4) | {"slot_mapping": engine.slots[:2]}
    with pytest.raises(
        ValueError, match="slot_mapping: 2 slots found for a captured size of 4 rows of 1 token; pad it"
    ):
        steps.build(**tensors)


class Planning(Least):
    """Plans, and notes what it saw."""

    def plan(self, metadata):
        self.seen = SimpleNamespace(step=metadata.step, builder=metadata.builder, kept=dict(metadata.kept))
        metadata.kept["plan"] = metadata.step
        if metadata.host.seq_lens[0] == 13:
            raise ValueError("metadata: 13 keys")


def test_a_plan_is_made_in_each_step_and_one_that_fails_leaves_no_step():
    backend = Planning(config())
    engine, steps = PersistentBuffers(), steps_of(backend)
    for number, length in enumerate((5, 9)):
        metadata = steps.build(**engine.fill([length], 1))
        assert (backend.seen.step, backend.seen.builder, backend.seen.kept) == (number, steps, {})
        assert metadata.kept == {"plan": number}
    with pytest.raises(ValueError, match="metadata: 13 keys"):
        steps.build(**engine.fill([13], 1), capturing=True)
    assert (steps.last_step, steps.captured) == (1, ())
    assert steps.build(**engine.fill([5], 1)).step == 2


class Recording(Planning):
    """Its graphs plan by themselves."""

    seen, recorded = None, 0

    def record_plan(self, metadata):
        self.recorded += 1
        return True


def test_steps_of_a_size_whose_graph_plans_are_not_planned():
    backend = Recording(config())
    engine, steps = PersistentBuffers(), steps_of(backend)
    steps.build(**engine.fill([5, 9], 2), capturing=True).record()
    assert (backend.seen.step, backend.recorded) == (0, 1)
    for length in (6, 13):
        assert not steps.build(**engine.fill([length, 9], 2)).kept
    assert backend.seen.step == 0
    steps.build(**engine.fill([5], 1))
    assert backend.seen.step == 3, "an eager step is planned, behind the copies of the plan before"
    assert steps._last_planned == 3
    steps.build(**engine.fill([5, 9], 2), capturing=True)  # captured anew, by a graph that does not plan
    steps.build(**engine.fill([5, 9], 2))
    assert backend.seen.step == 5
    steps.release(2)
    steps.build(**engine.fill([5, 9], 2), capturing=True).record()
    steps.build(**engine.fill([5, 9], 2))
    assert (backend.seen.step, backend.recorded) == (6, 2)
