"""A forked child and the calls that other threads were inside of: docs/threads-and-processes.md says what holds."""

import importlib
import os
import signal
import sys
import threading

import pytest
from builder.plain_backend import Least, config
from held_calls import Waits, inside, new_builder

from attncore import AdoptedSteps, CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


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


def test_a_thread_with_the_ident_of_a_dead_one_is_let_in(kernels):
    builder, waits = new_builder(kernels=kernels), Waits(a=[1000])

    def use():
        assert len(builder.batch.block_ids("a")) == 999
        builder.build()

    with inside(lambda: builder.batch.append_blocks_many(waits), waits) as thread:
        assert in_child(lambda: in_threads(use, thread.ident))


def test_a_list_builder_that_a_dead_thread_was_inside_of(kernels):
    builder, waits = CommonMetadataBuilder(4, kernels=kernels), Waits()
    groups = [SequenceGroup(False, [Sequence(0, 1, 3, [5])], False)]

    def use():
        assert builder.build(groups).slot_mapping.tolist() == [23]

    def build():
        builder.build([SequenceGroup(False, [Sequence(0, 1, 3, [waits])], False)])

    with inside(build, waits) as thread:
        assert in_child(lambda: in_threads(use, thread.ident))


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


class Planning(Least):
    """Its plan waits."""

    waits = None

    def plan(self, metadata):
        if self.waits is not None:
            _ = metadata.positions  # a field that is made on the device
            self.waits.wait()


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


def test_a_fork_while_another_thread_compiles():
    """The fork waits for it: the child would wait for ever for a thread that it does not have."""
    lock = pytest.importorskip("attncore.kernels.numba.library", reason="numba is not installed").global_compiler_lock
    importlib.import_module("attncore.kernels.numba.jit")
    inside, compiled = threading.Event(), threading.Event()

    def compiles():
        lock.acquire()
        inside.set()
        compiled.wait(0.5)
        lock.release()

    def check():
        signal.alarm(20)  # ends a child that waits
        lock.acquire()
        lock.release()

    thread = threading.Thread(target=compiles)
    thread.start()
    inside.wait(30)
    assert in_child(check)
    thread.join()
