"""A step that is built and sent in one call is the step of the longer way, over nodes that the host runs."""

import random
from pathlib import Path

import numpy as np
import pytest

from attncore import InputBatch, KVCacheGroup, MetadataBuilder, StateGroup
from attncore.builder.fields import FIELDS
from attncore.errors import CaptureError
from attncore.kernels import load_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device")

BLOCK = 4


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    found = pytest.importorskip("nodes_on_host")
    backends = pytest.importorskip("gpu_work")
    with found.nodes_on_host(lambda call, name: call):
        yield backends


class Served:
    """A batch and a builder; ``longer``: every step takes the longer way."""

    def __init__(self, nodes, longer, *, plans=False, sizes=(4, 8)):
        backend = (nodes.DummyPlan if plans else nodes.Backend)("cpu", BLOCK)
        self.batch = InputBatch(max_num_reqs=12, max_model_len=400, block_size=BLOCK)
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=256, decode_threshold=3, transport="graph"
        )
        self.builder.register_field(
            "doubled", np.int32, "request", lambda step, out: np.multiply(step.host.seq_lens, 2, out)
        )
        self.last = self.batch.token_column("last", np.int32, width=3)
        self.builder.register_column(self.last)
        self.graphs = {}
        for size in sizes:
            metadata = self.builder.capture(size)
            metadata.record()
            self.graphs[size] = nodes.CalledAgain(metadata.record)
        self.short, self.asked = 0, 0
        call = self.builder._sent_step
        assert call is not None

        def counted(*args):
            self.asked += 1
            found = call(*args)
            self.short += found is not None
            return found

        self.builder._sent_step = None if longer else counted

    def step(self, *args, bucket=None, **options):
        metadata = self.builder.build(*args, bucket=bucket, **options)
        if bucket is not None:
            metadata.replay(self.graphs[bucket])
        return metadata


def everything(metadata):
    found = {"req_ids": metadata.req_ids, "moves": metadata.moves, "max": metadata.max_seq_len}
    found |= {"counts": (metadata.num_tokens, metadata.num_decodes, metadata.num_prefills, metadata.num_actual_reqs)}
    for name in (*metadata.host.field_names(), "doubled", "last"):
        if FIELDS.get(name) is None or not FIELDS[name].internal:
            found[f"host {name}"] = np.asarray(getattr(metadata.host, name)).tolist()
    for name in ("seq_lens", "slot_mapping", "positions", "logits_indices", "doubled", "last", "paged_kv_indices"):
        found[name] = getattr(metadata, name).tolist()
    rows, pages = metadata.num_actual_reqs, metadata.host.paged_kv_num_pages.tolist()
    found["table"] = [metadata.block_table[row, : pages[row]].tolist() for row in range(rows)]
    return found


def random_step(draw, state, served):
    """Changes the batch, and says what is built: (args, options)."""
    batch = served.batch
    for name in list(batch.req_ids):
        if draw.random() < 0.06:
            batch.remove_request(name)
            state["left"].pop(name, None)
        elif draw.random() < 0.03:
            batch.preempt(name)
            batch.append_blocks(name, [state["next"] + i for i in range(3)])
            state["next"] += 3
            state["left"][name] = 9
    while len(batch) < 10 and draw.random() < 0.4:
        name, prompt = draw.choice((state["names"], f"request {state['names']}")), draw.randrange(1, 30)
        state["names"] += 1
        count = -(-prompt // BLOCK)
        batch.add_request(name, [state["next"] + i for i in range(count)])
        state["next"] += count
        state["left"][name] = prompt
        served.last.give(name, list(range(40)))
    scheduled = {}
    for name in batch.req_ids:
        left = state["left"][name]
        scheduled[name] = count = draw.choice((0, min(left, 7), left)) if left else draw.choice((1, 1, 1, 1, 0, 3))
        state["left"][name] = max(left - count, 0)
        held, computed = len(batch.block_ids(name)), batch.num_computed_tokens(name)
        missing = -(-(computed + count) // BLOCK) - held
        if missing > 0:
            batch.append_blocks(name, [state["next"] + i for i in range(missing)])
            state["next"] += missing
    named = {name: count for name, count in scheduled.items() if count != 1 or draw.random() < 0.7}
    if draw.random() < 0.3:
        named = dict(reversed(named.items()))
    running = [count for count in scheduled.values() if count]
    bucket = next((size for size in served.graphs if size >= len(running)), None) if {*running} <= {1} else None
    return (named,), {"bucket": bucket}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plans", [False, True])
def test_random_steps_are_those_of_the_longer_way(nodes, seed, plans):
    one, other = Served(nodes, longer=False, plans=plans), Served(nodes, longer=True, plans=plans)
    draws = [random.Random(seed) for _ in range(2)]
    states = [{"names": 300, "next": 1, "left": {}} for _ in range(2)]
    for number in range(120):
        found = []
        for draw, state, served in zip(draws, states, (one, other), strict=True):
            args, options = random_step(draw, state, served)
            metadata = served.step(*args, **options)
            found.append(everything(metadata))
            served.last.write(metadata, [number + row for row in range(12)])
        assert found[0] == found[1], number
    assert one.short == one.asked == 120


@pytest.mark.parametrize("asker", ["fill", "plan"])
def test_what_is_first_asked_for_while_a_step_is_built_is_sent_with_it(nodes, asker):
    """Ahead of the nodes, as the longer way sends it; from then on no step is built in one call."""

    class Asking(nodes.DummyPlan):
        def plan(self, metadata):
            if asker == "plan":
                _ = metadata.query_lens.shape

    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, Asking("cpu", BLOCK), max_num_batched_tokens=64, transport="graph")
    if asker == "fill":
        builder.register_field("own", np.int32, "request", lambda metadata, out: metadata.query_lens.shape)
    assert "query_lens" in builder._assembly.side.unsent
    assert builder._sent_step is not None
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", [3, 4], 4)
    for scheduled in ({"b": 3}, {}):
        metadata = builder.build(scheduled)
        assert metadata.query_lens.tolist() == metadata.host.query_lens.tolist()


def filled(served, count=4):
    for i in range(count):
        served.batch.add_request(f"request {i}", [10 * i + k + 1 for k in range(5)], 6)
        served.last[f"request {i}"] = i
    served.step(bucket=4)
    return served


def state_of(served):
    batch, builder = served.batch, served.builder
    return (
        builder.last_step, batch.req_ids, [batch.num_computed_tokens(name) for name in batch.req_ids],
        batch._core.state.busy, batch._core.state.unfinished, [*batch._core.undo],
    )  # fmt: skip


@pytest.mark.parametrize(
    "scheduled",
    [{"request 0": 20}, {"nobody": 1}, {None: 1}, {"request 1": -1}, {"request 2": 1.5}, {"request 2": 400}, [1]],
)
def test_what_is_refused_is_refused_by_the_longer_way_and_changes_nothing(nodes, scheduled):
    served = filled(Served(nodes, longer=False))
    if None in scheduled:
        served.batch.remove_request("request 1")  # leaves a hole, in place of whose name None stands
    before = state_of(served)
    with pytest.raises((ValueError, TypeError), match=r"^(scheduled|block_table|bucket)"):
        served.step(scheduled)
    assert state_of(served) == before
    served.step()
    assert served.builder.last_step == before[0] + 1


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("where", ["plan", "fill"])
def test_a_plan_or_a_field_that_raises_takes_the_step_back(nodes, named, where):
    served, control = (filled(Served(nodes, longer, plans=True)) for longer in (False, True))
    before = state_of(served)

    def fails(metadata):
        raise KeyboardInterrupt

    short = served.builder._assembly.in_one_call
    kept = served.builder._backends.plans, short.fill
    if where == "plan":
        served.builder._backends.plans = tuple((group, fails) for group, _ in kept[0])
    else:
        short.fill = fails
    scheduled = {"request 2": 2, "request 0": 1} if named else {}
    with pytest.raises(KeyboardInterrupt):
        served.step(scheduled)
    assert state_of(served)[:5] == before[:5]
    served.builder._backends.plans, short.fill = kept
    assert everything(served.step(scheduled)) == everything(control.step(scheduled))
    assert served.short == served.asked - 1


def test_a_step_that_waits_for_its_replay_is_not_passed_over(nodes):
    served = filled(Served(nodes, longer=False))
    metadata = served.builder.build(bucket=4)
    with pytest.raises(CaptureError, match="not replayed"):
        served.builder.build(bucket=4)
    metadata.abandon()
    assert served.step(bucket=4).step == metadata.step


def test_a_graph_without_record_or_without_replay_is_refused(nodes):
    served = filled(Served(nodes, longer=False))
    metadata = served.builder.build(bucket=4)
    with pytest.raises(TypeError, match=r"^graph"):
        metadata.replay(3)
    metadata.replay(served.graphs[4])
    with pytest.raises(CaptureError, match="replayed once"):
        metadata.replay(served.graphs[4])


def test_a_request_that_rests_for_a_slot_is_refused_in_one_call_too(nodes):
    groups = [KVCacheGroup("full", BLOCK), StateGroup("mamba")]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups)
    builder = MetadataBuilder(batch, nodes.Backend("cpu", BLOCK), max_num_batched_tokens=32, transport="graph")
    for name in "ab":
        batch.add_request(name, {"full": [1, 2], "mamba": [1 + "ab".index(name)]})
    assert builder._sent_step({"a": 2}, 1, None).states["mamba"].state_slot.tolist() == [2, 1]
    batch.preempt("a")
    batch.append_blocks("a", {"full": [3]})
    assert builder._sent_step({"a": 1}, 1, None) is None
    with pytest.raises(ValueError, match=r"^scheduled: .*'a'\) was preempted and rests"):
        builder.build({"a": 1})
    assert builder._sent_step({"a": 0}, 1, None).req_ids == ("b",)
