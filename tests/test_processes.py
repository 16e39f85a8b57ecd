"""Builders in several threads and processes: docs/threads-and-processes.md says what works, and each is tried here."""

import contextlib
import copy
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builder.plain_backend import Least, config
from spawned_process import slots_of_a_step

from attncore import AdoptedSteps, CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def new_builder(**options):
    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=4, **options)
    batch.add_request("a", range(1, 1000), 3)
    return MetadataBuilder(batch, max_num_batched_tokens=16)


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


def in_child(check):
    """Runs ``check`` in a forked child; whether it returned."""
    child = os.fork()
    if child == 0:
        try:
            check()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_batch_of_its_own(kernels):
    builder = new_builder(kernels=kernels)
    builder.build()

    def check():
        assert builder.build().positions.tolist() == [4]
        builder.batch.add_request("child", [7])
        assert builder.batch.num_reqs == 2

    assert in_child(check)
    assert builder.batch.req_ids == ("a",)
    assert builder.build().positions.tolist() == [4]


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside(kernels):
    """That thread is not in the child: the batch is free there, and what it had begun is undone."""
    builder, inside, leave = new_builder(kernels=kernels), threading.Event(), threading.Event()

    class Slow(dict):
        def items(self):
            inside.set()
            leave.wait(30)
            return super().items()

    thread = threading.Thread(target=lambda: builder.batch.append_blocks_many(Slow(a=[1000])))
    thread.start()
    inside.wait(30)

    def check():
        assert builder.build().positions.tolist() == [3]
        assert len(builder.batch.remove_request("a")) == 999

    try:
        assert in_child(check)
        with pytest.raises(ConcurrentUseError):
            builder.build()
    finally:
        leave.set()
        thread.join()
    assert len(builder.batch.block_ids("a")) == 1000


class Waits(dict):
    """Its items end when they are let: a call that goes through them is inside until then."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.begun, self.let = threading.Event(), threading.Event()

    def items(self):
        yield from super().items()
        self.wait()

    def __index__(self):
        self.wait()
        return 3

    def wait(self):
        self.begun.set()
        self.let.wait(30)


@contextlib.contextmanager
def inside(call, waits):
    """A thread that is inside ``call``."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert waits.begun.wait(30)
        yield thread
    finally:
        waits.let.set()
        thread.join()


def in_threads(call, ident):
    """Calls ``call`` in threads that live at once, until one has this ident: it is one of a dead thread's."""
    raised, ended, threads = [], threading.Event(), []

    def work():
        try:
            call()
        except BaseException as error:
            raised.append(error)
        ended.wait(30)

    while len(threads) < 20 and ident not in {thread.ident for thread in threads}:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    ended.set()
    for thread in threads:
        thread.join()
    assert ident in {thread.ident for thread in threads}
    if raised:
        raise raised[0]


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "read",
    [
        lambda batch: len(batch.block_ids("a")) == 999,
        lambda batch: batch.num_computed_tokens("a") == 3 and len(batch.block_ids("a")) == 999,
        lambda batch: batch.req_ids == ("a",) and not batch.block_table[0, 999],
    ],
)
def test_a_reader_in_a_forked_child_sees_no_half_of_a_call(kernels, read):
    """Of a thread that is not there: no call need come before."""
    builder, waits = new_builder(kernels=kernels), Waits(a=[1000])

    def check():
        assert read(builder.batch)

    with inside(lambda: builder.batch.append_blocks_many(waits), waits):
        assert len(builder.batch.block_table[0].nonzero()[0]) == 1000  # it has begun
        assert in_child(check)


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_size_that_a_dead_thread_was_capturing_is_none(kernels):
    pytest.importorskip("torch")
    backend, waits = Planning(config()), Waits()
    builder = MetadataBuilder(new_builder(kernels=kernels).batch, backend, max_num_batched_tokens=16)
    backend.waits = waits

    def check():
        assert builder.captured == ()

    with inside(lambda: builder.capture(2), waits):
        assert in_child(check)
    assert builder.captured == (2,)


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_thread_with_the_ident_of_a_dead_one_is_let_in(kernels):
    builder, waits = new_builder(kernels=kernels), Waits(a=[1000])

    def use():
        assert len(builder.batch.block_ids("a")) == 999
        builder.build()

    with inside(lambda: builder.batch.append_blocks_many(waits), waits) as thread:
        assert in_child(lambda: in_threads(use, thread.ident))


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_list_builder_that_a_dead_thread_was_inside_of(kernels):
    builder, waits = CommonMetadataBuilder(4, kernels=kernels), Waits()
    groups = [SequenceGroup(False, [Sequence(0, 1, 3, [5])], False)]

    def use():
        assert builder.build(groups).slot_mapping.tolist() == [23]

    def build():
        builder.build([SequenceGroup(False, [Sequence(0, 1, 3, [waits])], False)])

    with inside(build, waits) as thread:
        assert in_child(lambda: in_threads(use, thread.ident))


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_adopted_steps_that_a_dead_thread_was_inside_of(kernels):
    torch = pytest.importorskip("torch")
    given = {
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32), "slot_mapping": torch.tensor([6]),
        "seq_lens": torch.tensor([3], dtype=torch.int32), "block_table": torch.tensor([[1]], dtype=torch.int32),
    }  # fmt: skip
    longer = given | {"seq_lens": torch.tensor([4], dtype=torch.int32), "slot_mapping": torch.tensor([7])}
    backend, waits = Planning(config()), Waits()
    steps = AdoptedSteps(backend, max_num_reqs=2, max_num_tokens=8, max_model_len=16, num_blocks=8, kernels=kernels)
    last = steps.build(**given)
    assert last.positions.tolist() == [2]
    backend.waits = waits

    def use():
        backend.waits = None
        assert steps.build(**longer).positions.tolist() == [3]

    def refused():
        backend.waits = None
        with pytest.raises(ValueError, match="seq_lens"):
            steps.build(**given | {"seq_lens": longer["seq_lens"][:0]})
        assert last.positions.tolist() == [2]

    with inside(lambda: steps.build(**longer), waits) as thread:
        assert last.positions.tolist() == [3]  # it has begun
        assert in_child(lambda: in_threads(use, thread.ident))
        assert in_child(refused)


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_prompt_that_a_dead_thread_was_turning_is_one_after_the_next_call(kernels):
    pytest.importorskip("torch")
    backend, waits = Planning(config()), Waits()
    builder = CommonMetadataBuilder(4, "flash", backend=backend, kernels=kernels)
    groups = [SequenceGroup(True, [Sequence(0, 3, 0, [5])], False)]
    metadata, backend.waits = builder.build(groups), waits

    def check():
        backend.waits = None
        builder.build(groups)
        assert (metadata.num_prefills, metadata.advanced) == (1, 0)

    with inside(lambda: metadata.advance_step(turn_prefills_into_decodes=True), waits):
        assert metadata.advanced  # it has begun
        assert in_child(check)
    assert (metadata.num_prefills, metadata.advanced) == (0, 1)


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


class Planning(Least):
    """Its plan waits."""

    waits = None

    def plan(self, metadata):
        if self.waits is not None:
            _ = metadata.positions  # a field that is made on the device
            self.waits.wait()


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_thread_that_forks_inside_a_call_is_inside_in_the_child_too(kernels):
    """Its call goes on there, and no other thread comes into it; nor does a child of that one's."""
    builder, done = new_builder(kernels=kernels), []

    def refused():
        with pytest.raises(ConcurrentUseError):
            builder.build()
        with pytest.raises(ConcurrentUseError):
            builder.batch.block_ids("a")

    def check():
        with pytest.raises(ConcurrentUseError):
            builder.build()
        assert len(builder.batch.block_ids("a")) == 999
        thread = threading.Thread(target=lambda: (refused(), done.append(in_child(in_grandchild))))
        thread.start()
        thread.join()
        assert done == [True]

    def in_grandchild():
        assert builder.build().positions.tolist() == [3]

    class Forking(dict):
        def items(self):
            done.append(in_child(check))
            return super().items()

    builder.batch.append_blocks_many(Forking(a=[1000]))
    assert done == [True]
    assert len(builder.batch.block_ids("a")) == 1000


@forks
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_builder_of_a_device_says_so_in_a_forked_child():
    by_copy = pytest.importorskip("attncore.builder.device.by_copy")
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    batch.add_request("a", [1, 2, 3, 4])
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    by_copy._ON_CUDA.add(builder._assembly.side)  # on a CPU: as if it were on a GPU

    def check():
        with pytest.raises(RuntimeError, match=r"^build: this builder was made before os.fork\(\)"):
            builder.build()
        assert batch.num_computed_tokens("a") == 0

    assert in_child(check)
    assert builder.build().num_tokens == 1


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
