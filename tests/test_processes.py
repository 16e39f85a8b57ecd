"""Builders in several threads and processes: docs/threads-and-processes.md says what works, and each is tried here."""

import copy
import multiprocessing
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from held_calls import Waits, inside, new_builder
from spawned_process import slots_of_a_step

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError


def objects(kernels):
    builder = new_builder(kernels=kernels)
    return builder.batch, builder, CommonMetadataBuilder(4, kernels=kernels)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_what_kernels_write_to_is_not_copied(kernels, copied):
    for one in objects(kernels):
        name = type(one).__name__
        with pytest.raises(TypeError, match=f"^{name}: cannot be copied or pickled, .*make one in each process"):
            copied(one)


def test_one_batch_in_two_threads(kernels):
    """Each call happens or is refused with ConcurrentUseError; in the end every token of every call is there."""
    builder, done, refused, wrong = new_builder(kernels=kernels), [0, 0], [], []
    interval = sys.getswitchinterval()

    def work(me):
        for _ in range(400):
            try:
                builder.build() if me else builder.build({"a": 2})
                done[me] += 1
            except ConcurrentUseError as error:
                refused.append(str(error))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert all(text.startswith("batch: a caller is inside it") for text in refused)
    assert builder.last_step + 1 == sum(done)
    assert builder.batch.num_computed_tokens("a") == 3 + 2 * done[0] + done[1]


def test_a_batch_for_each_of_several_threads(kernels):
    wrong = []

    def work():
        builder = new_builder(kernels=kernels)
        for k in range(200):
            if builder.build().positions.tolist() != [3 + k]:
                wrong.append(k)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("transport", ["auto", "copy"])
@pytest.mark.parametrize("read", [lambda step: step.paged_kv_indices, lambda step: step.host.paged_kv_indices])
def test_pages_are_not_gathered_beside_another_threads_build(kernels, transport, read):
    """A build changes the tables that they are gathered from, and the buffer that they are gathered into."""
    pytest.importorskip("torch")
    batch, waits = new_builder(kernels=kernels).batch, Waits()
    builder = MetadataBuilder(batch, max_num_batched_tokens=16, transport=transport)
    builder.register_field("slow", np.int32, "request", lambda metadata, out: builder.last_step and waits.wait())
    metadata = builder.build()
    with inside(builder.build, waits), pytest.raises(ConcurrentUseError):
        read(metadata)
    assert read(builder.last_metadata).tolist() == [1, 2]


@pytest.mark.parametrize("transport", ["auto", "copy"])
@pytest.mark.parametrize("fails", [False, True])
def test_pages_that_change_while_they_are_gathered_are_refused(kernels, transport, fails):
    """A call of another thread may begin and end meanwhile; what torch says of the arrays of two steps is no matter."""
    pytest.importorskip("torch")
    batch = new_builder(kernels=kernels).batch
    builder = MetadataBuilder(batch, max_num_batched_tokens=16, transport=transport, depth=1)
    metadata = builder.build()

    def read():
        thread = threading.Thread(target=builder.build)
        thread.start()
        thread.join()
        if fails:
            raise RuntimeError("allocated size does not match required size")

    with pytest.raises(ConcurrentUseError, match="a caller is inside"):
        metadata.read_alone(read)
    with pytest.raises(ZeroDivisionError):
        metadata.read_alone(lambda: 1 / 0)
    assert metadata.paged_kv_indices.tolist() == [1, 2]


def test_the_last_step_is_found_while_a_size_is_released(monkeypatch):
    builder = new_builder()
    builder.capture(2)
    metadata = builder.build()
    entries = type(builder._assembly.shapes.captured).__iter__

    def released(sizes):  # another thread's call, between the sizes and their entries
        found = list(entries(sizes))
        sizes.drop(2)
        return iter(found)

    monkeypatch.setattr(type(builder._assembly.shapes.captured), "__iter__", released)
    assert builder.last_metadata is metadata


REFUSED = {
    "num_computed_tokens": lambda builder: builder.batch.num_computed_tokens("a"),
    "encoder_seq_len": lambda builder: builder.batch.encoder_seq_len("a"),
    "block_ids": lambda builder: builder.batch.block_ids("a"),
    "needs_block": lambda builder: builder.batch.needs_block(),
    "column[req_id]": lambda builder: builder.batch_column["a"],
}
SHOWN = {
    "req_id in batch": (lambda builder: "a" in builder.batch, True),
    "len": (lambda builder: len(builder.batch), 1),
    "iter": (lambda builder: list(builder.batch), ["a"]),
    "req_ids": (lambda builder: builder.batch.req_ids, ("a",)),
    "num_reqs": (lambda builder: builder.batch.num_reqs, 1),
    "num_rows": (lambda builder: builder.batch.num_rows, 1),
    "block_table": (lambda builder: builder.batch.block_table[0, :2].tolist(), [1, 2]),
    "repr": (lambda builder: repr(builder.batch)[:12], "<InputBatch:"),
    "last_step": (lambda builder: builder.last_step, 0),
    "last_metadata": (lambda builder: builder.last_metadata.step, 0),
    "captured": (lambda builder: builder.captured, ()),
}
"""What is read while the first build is under way; the row of a request that it found removed is filled already."""


def test_the_page_names_what_is_read_beside_another_threads_call():
    page = (Path(__file__).parents[1] / "docs/threads-and-processes.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| reading while another thread is inside |")]
    refused, shown, _ = re.split(r" raise `ConcurrentUseError`\. | are not refused", row)
    named = [re.findall("`([^`]+)`", part) for part in (refused, shown)]
    assert named == [[*REFUSED, "paged_kv_indices"], [*SHOWN]]


@pytest.mark.parametrize("name", [*REFUSED, *SHOWN])
def test_reading_beside_another_threads_build_is_as_the_page_says(kernels, name):
    batch, waits = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=4, kernels=kernels), Waits()
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)
    builder.batch_column = batch.column("more", np.int32)
    batch.add_request("gone", [3])
    batch.add_request("a", [1, 2], 3)
    batch.remove_request("gone")
    builder.register_field("slow", np.int32, "request", lambda metadata, out: waits.wait())
    with inside(builder.build, waits):
        if name in REFUSED:
            with pytest.raises(ConcurrentUseError):
                REFUSED[name](builder)
        else:
            read, expected = SHOWN[name]
            assert read(builder) == expected


def test_a_spawned_process_makes_its_own_from_requests():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        answer = pool.submit(slots_of_a_step, [("a", [5, 6], 4), ("b", [7], 1)])
        assert answer.result(timeout=120) == [24, 29]


def test_an_interpreter_without_the_gil_is_refused():
    program = "import sys; sys._is_gil_enabled = lambda: {}; import attncore; print(attncore.__version__)"
    refused, taken = (
        subprocess.run([sys.executable, "-c", program.format(enabled)], capture_output=True, text=True)
        for enabled in (False, True)
    )
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("ImportError: attncore: this interpreter runs without the GIL")
    assert taken.returncode == 0


def test_groups_of_sequences_are_values():
    """What a list builder takes can be sent to another process."""
    group = SequenceGroup(False, [Sequence(0, 1, 3, [5])], False)
    assert CommonMetadataBuilder(4).build([pickle.loads(pickle.dumps(group))]).slot_mapping.tolist() == [23]
