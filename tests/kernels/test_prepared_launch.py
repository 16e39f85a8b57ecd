"""A compiled Triton kernel is launched as Triton does it itself, or its own way where that is another."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from attncore.builder.device import triton_kernels
from attncore.kernels import prepared_launch as module
from attncore.ops import cache_writer_triton

TRIAL = (1000, 0, 4)


class Compiled:
    """What Triton gives for a kernel; ``num_before`` as many arguments of ``run`` as before the kernel's own."""

    function, packed_metadata = "function", "packed"

    def __init__(self, num_before=9, error=TypeError):
        self.calls, self.num_before, self.error = [], num_before, error

    def run(self, *arguments):
        if len(arguments) != self.num_before + len(TRIAL):
            raise self.error("another number of arguments")
        self.calls.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, *arguments))


@pytest.fixture
def streams(monkeypatch):
    """The driver's streams: one for each device, and another at each call."""
    asked = []

    def stream_of(device):
        asked.append(device)
        return f"stream {len(asked)} of {device}"

    monkeypatch.setattr(module, "_current_stream", lambda: stream_of)
    return asked


def test_the_kernel_is_launched_on_the_stream_that_is_current_at_the_launch(streams):
    compiled = Compiled()
    launch = module.prepared_launch(compiled, 3, *TRIAL)
    launch(256, 2, 2000, 7, 8)
    before = "function", "packed", None, None, None
    assert compiled.calls == [
        (1, 1, 1, "stream 1 of 3", *before, *TRIAL),
        (256, 2, 1, "stream 2 of 3", *before, 2000, 7, 8),
    ]
    assert streams == [3, 3]


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, SystemError])
def test_a_triton_that_launches_in_another_way_is_called_its_own(streams, error):
    compiled = Compiled(num_before=8, error=error)
    launch = module.prepared_launch(compiled, 0, *TRIAL)
    launch(256, 2, 2000, 7, 8)
    assert compiled.calls == [((256, 2, 1), 2000, 7, 8)]


@pytest.mark.parametrize("lacks", ["function", "packed_metadata"])
def test_a_kernel_without_what_is_read_is_called_its_own_way(streams, monkeypatch, lacks):
    monkeypatch.delattr(Compiled, lacks)
    compiled = Compiled()
    module.prepared_launch(compiled, 0, *TRIAL)(4, 1, 5)
    assert compiled.calls == [((4, 1, 1), 5)]


def test_an_interrupted_trial_is_raised(streams):
    with pytest.raises(KeyboardInterrupt):
        module.prepared_launch(Compiled(num_before=8, error=KeyboardInterrupt), 0, *TRIAL)


class Kernel:
    """In place of the kernel of page lists before it is compiled: notes launches, and gives what it was compiled to."""

    def __init__(self):
        self.launches, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(*arguments):
            self.launches.append((grid, *arguments))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


def addresses(arguments):
    return tuple(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments)


def test_page_lists_are_launched_with_the_arguments_of_the_kernel(monkeypatch):
    """Addresses in place of tensors, and nothing else differs."""
    kernel, prepared = Kernel(), []

    def prepare(compiled, device_index, *trial):
        launches = []
        prepared.append((compiled, trial, launches))
        return lambda rows, blocks, *arguments: launches.append(((rows, blocks, 1), *arguments))

    monkeypatch.setattr(triton_kernels, "_sum_lengths", kernel)
    monkeypatch.setattr(triton_kernels, "prepared_launch", prepare)
    words, pages = torch.zeros(96, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    sums = triton_kernels.SumLengths(words, 32, 16)
    assert [compiled for compiled, _, _ in prepared] == kernel.compiled
    for (_, trial, _), (_, *first) in zip(prepared, kernel.launches, strict=True):
        assert trial[:5] == (words.data_ptr(),) * 4 + (0,), "a trial is of no rows, and of memory that it may read"
        assert trial[7:] == tuple(first[7:])
    lengths, table = torch.zeros(5, dtype=torch.int32), torch.zeros((5, 9), dtype=torch.int32)[:, :7]
    for out, (_, _, launches) in zip((None, pages), prepared, strict=True):
        sums(lengths, table, out, 7, 2000)
        usual, sums._launches = sums._launches, {}
        sums(lengths, table, out, 7, 2000)
        sums._launches = usual
        assert launches == [addresses(kernel.launches[-1])]
        assert launches[0][0] == (5, 1 if out is None else 4, 1)
    assert len(kernel.launches) == 4


def test_tokens_are_stored_with_the_arguments_of_the_kernel(monkeypatch):
    """From the second launch on, of tensors of the same kind."""
    kernel, trials, launches, kept = Kernel(), [], [], {}

    def prepare(compiled, device_index, *trial):
        trials.append((compiled, device_index, trial))
        return lambda rows, blocks, *arguments: launches.append(((rows,), blocks, *arguments))

    monkeypatch.setattr(cache_writer_triton, "store_both", kernel)
    monkeypatch.setattr(cache_writer_triton, "prepared_launch", prepare)

    def store(count, kept):
        new, slots = [torch.zeros(count, 2, 8) for _ in range(2)], torch.arange(count)
        caches = torch.zeros(2, 3, 4, 2, 8)
        given = [*new, *caches, slots, 1.0, scale, 0.0]
        cache_writer_triton.store(*given, kept)
        return given

    scale = torch.ones(2)
    store(4, kept)
    ((compiled, device, trial),) = trials
    assert (compiled, device) == (kernel.compiled[0], -1)
    assert trial == (*addresses(kernel.launches[0][1:6]), *kernel.launches[0][6:]), "a trial stores what was stored"
    given = store(7, kept)
    assert launches == [((7,), 1, *addresses(given[:5]), *trial[5:])]
    assert len(kernel.launches) == 1
