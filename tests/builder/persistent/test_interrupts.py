"""A call that an exception from outside interrupts, before any opcode, has happened fully or not at all."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from interrupted_calls import GROUPS, AtOpcode, Engine

from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import AttncoreError, ConcurrentUseError

SCRIPT = Path(__file__).parents[2] / "alarms.py"
CALLS = ["add", "append", "remove", "preempt", "replace", "truncate", "rollback", "swap", "capture", "release", "build"]


def until(engine, name):
    """Makes calls until one of ``name`` fits, and returns that one."""
    while True:
        found, function, change = engine.next_call()
        if found == name:
            return function, change
        engine.call(function, change, contextlib.nullcontext())


@pytest.mark.parametrize(("groups", "fills", "transport"), [("windows", False, "auto"), ("cross", True, "copy")])
@pytest.mark.parametrize("name", CALLS)
def test_opcodes_of_a_call(name, groups, fills, transport):
    """The same call again and again, interrupted some opcodes later each time, until it is not interrupted."""
    engine = Engine(len(name), groups, fills=fills, transport=transport)
    function, change = until(engine, name)
    count, step = 0, {"capture": 131, "build": 7}.get(name, 1)
    while not engine.call(function, change, AtOpcode(count)):
        count += step
    assert count > 10 * step
    for _ in range(10):
        _, function, change = engine.next_call()
        engine.call(function, change, contextlib.nullcontext())


@pytest.mark.parametrize("groups", GROUPS)
def test_opcodes_of_the_numba_twin(groups):
    engine = Engine(1, groups, kernels="numba")
    for k in range(150):
        _, function, change = engine.next_call()
        engine.call(function, change, AtOpcode(int(engine.draw.integers(600))) if k > 50 else contextlib.nullcontext())


@pytest.mark.parametrize("transport", ["auto", "copy"])
@pytest.mark.parametrize("spans", [False, True])
def test_the_last_step_of_a_captured_size_is_its_own_behind_an_interrupted_build(kernels, spans, transport):
    """Graphs read the fields of all sizes in one place: there is the last step again, or it is no last step."""
    batch = InputBatch(max_num_reqs=4, max_model_len=2000, block_size=16, spans=True, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport=transport)
    for bucket in (4, 2):
        builder.capture(bucket)
    for name in range(2):
        batch.add_request(name, list(range(1 + 125 * name, 126 + 125 * name)))
        batch.set_spans(name, [(1990, 2000)] if spans else [])
    count, kept = 0, 0
    while True:
        builder.build(bucket=2 if count % 3 else 4)
        expected = builder.last_metadata.host.seq_lens.tolist()
        with AtOpcode(count) as interrupt:
            builder.build(bucket=4 if count % 2 else 2)
        if not interrupt.fired:
            break
        last = builder.last_metadata
        if last is not None and last.host.seq_lens.tolist() == expected:
            assert last.seq_lens.tolist() == expected
            kept += 1
        count += 1
    assert kept > 20


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that signals")
@pytest.mark.parametrize("kernels", ["cython", "numba"])
def test_alarms(kernels):
    """``python tests/alarms.py`` for seconds, in a process of its own: what it is tested for includes a crash."""
    command = [sys.executable, str(SCRIPT), "--alarms", "2000", "--seconds", "5", "--kernels", kernels]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"[1-9]\d+ alarms in \d+ s: no inconsistent state\n", done.stdout)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_register_field_and_close(transport):
    """Before and after each interrupt a step is built, with the field or without it."""
    for count in [*range(60), *range(60, 60_000, 701)]:
        batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
        builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport=transport)
        batch.add_request("a", [1, 2], 3)
        with AtOpcode(count) as interrupt:
            builder.register_field("rows", np.int32, "request", lambda metadata, out: out.fill(7))
        if not interrupt.fired:
            break
        if "rows" not in builder._engine_fields.registered:
            builder.register_field("rows", np.int32, "request", lambda metadata, out: out.fill(7))
        metadata = builder.build()
        assert metadata.slot_mapping.tolist() == [7]
        assert metadata.host.rows.tolist() == [7]
        with AtOpcode(count % 90):
            builder.close()
        builder.close()
        with pytest.raises(AttncoreError, match="closed"):
            builder.build()
    else:
        pytest.fail("no call came to its end")


def test_a_call_inside_a_call_is_refused_and_reading_is_not():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    batch.add_request("a", [1, 2], 3)
    seen = []

    def fill(metadata, out):
        with pytest.raises(ConcurrentUseError):
            batch.remove_request("a")
        seen.append((batch.req_ids, batch.num_computed_tokens("a"), builder.last_step))

    builder.register_field("rows", np.int32, "request", fill)
    builder.build()
    assert seen == [(("a",), 4, 0)]
    assert batch.remove_request("a") == [1, 2]
