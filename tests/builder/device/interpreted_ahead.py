"""Run with TRITON_INTERPRET=1: the nodes of the transport ``graph``, on the CPU, run steps ahead as they are built.

With the word "short" each kind of groups runs on one implementation of the kernels, and for fewer steps.

A graph is its nodes, run at each replay: what only a device shows (late replays) is of benchmarks/gpu_ahead.py.
"""

import sys

import pytest
import torch
from builder.device import ahead_engine
from builder.device.ahead_engine import GROUPS, AheadEngine, fields_of

from attncore.builder.device import by_copy, by_graph, triton_kernels
from attncore.builder.persistent import assembly
from attncore.errors import CaptureError

SHORT = "short" in sys.argv
torch.cuda.synchronize = lambda *_: None
# A step that is sent with another field is not sent in one call.
ahead_engine.OF_STEP = ("seq_lens", "context_lens", "positions", "seq_start_loc")
triton_kernels._AHEAD_ROWS, triton_kernels._WORDS, triton_kernels._PAGES_BLOCK = 4, 1024, 16  # more than once over rows
by_copy.JOURNAL_ENTRIES = 256


class OnTheCPU(by_graph.GraphTransport):
    """Its small graphs are functions."""

    def prepare(self, capacity):
        return lambda: self._nodes(capacity)

    def problem(self):
        return ""

    def send_with_all(self):
        """Nothing here: what is sent beside an arena keeps steps from being sent in one call."""


def new_transport(transport, device, tables, page_lists):
    return OnTheCPU("cpu", tables, range(len(tables))) if transport == "graph" else None


assembly.new_transport = new_transport


def steps_are_equal(seed, groups, depth, kernels):
    engine = AheadEngine(seed, groups=groups, depth=depth, kernels=kernels, transport="graph")
    calls, run_ahead = [], engine.builder.run_ahead

    def kept(*args, **options):
        calls.append(run_ahead(*args, **options))
        return calls[-1]

    engine.builder.run_ahead = kept
    while engine.steps < (6 if SHORT else 40):
        engine.turn()
    in_one_call = [steps._launch is not None for steps in calls]
    assert set(in_one_call) == {kernels == "cython"}, in_one_call
    return engine


def a_replay_too_many_sees_no_rows(engine):
    while len(engine.batch) < 2:
        engine.churn()
    engine.step()
    engine.give_blocks(3)
    steps, calls = engine.builder.run_ahead(3, bucket=6), engine.graphs[6, 1]
    for _ in range(3):
        steps.replay(calls)
    seen = calls.take()
    calls.replay()
    (after,) = calls.take()
    group = engine.groups[0].name
    assert seen[2][group, "seq_lens"] == fields_of(steps[2])[group, "seq_lens"]
    assert not any(after[group, "seq_lens"])
    assert set(after[group, "slot_mapping"]) == {-1}
    engine.give_blocks(2)
    steps = engine.builder.run_ahead(2, bucket=6)  # and the next steps are not disturbed
    steps.replay(engine.graphs[6, 2], 2)
    assert [seen == fields_of(step) for seen, step in zip(engine.graphs[6, 2].take(), steps, strict=True)] == [True] * 2


def a_replay_between_is_found_out(engine):
    """The arena holds no step any more then: it is not advanced from nothing."""
    engine.give_blocks(2)
    steps = engine.builder.run_ahead(2, bucket=6)
    steps.replay(engine.graphs[6, 1])
    engine.graphs[6, 1].replay()
    steps.replay(engine.graphs[6, 1])
    *_, last = engine.graphs[6, 1].take()
    assert not any(last[engine.groups[0].name, "seq_lens"])
    by_graph.DEADLINE = 0.01
    with pytest.raises(CaptureError, match="did not read step"):
        some_empty_steps(engine)


def some_empty_steps(engine):
    for _ in range(5):
        engine.builder.build_empty(6).replay(engine.graphs[6, 1])


for seed, name in enumerate(GROUPS):
    for kernels in ("numba", "cython")[seed % 2 :: 2] if SHORT else ("numba", "cython"):
        made = steps_are_equal(seed, name, 1 + seed % 3, kernels)
        a_replay_too_many_sees_no_rows(made)
a_replay_between_is_found_out(made)
print("equal")
