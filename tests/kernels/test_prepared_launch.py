"""A compiled Triton kernel is launched as Triton does it itself, or its own way where that is another."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from attncore.builder.device import triton_kernels
from attncore.kernels import prepared_launch as module
from attncore.ops import cache_writer_triton
from attncore.ops.cache_writer import CacheWriter
from attncore.ops.cache_writer_checks import NAMES

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


class Stored:
    """A writer into caches on the CPU whose kernel is replaced: what was launched anew, and what was launched again."""

    def __init__(self, monkeypatch, latent=False):
        self.kernel, self.again = Kernel(), []
        monkeypatch.setattr(cache_writer_triton, "store_both", self.kernel)
        monkeypatch.setattr(
            cache_writer_triton,
            "prepared_launch",
            lambda compiled, device, *trial: lambda rows, blocks, *given: self.again.append((rows, blocks, *given)),
        )
        writer = CacheWriter()

        def store(key, value, keys, values, slots):  # as the writer on a GPU
            writer._check(key, value, keys, values, slots)
            cache_writer_triton.store(key, value, keys, values, slots, 1.0, 1.0, 0.0, writer._launches)

        self.caches = [torch.zeros(3, 4, 2, 8)] * 2 if latent else [*torch.zeros(2, 3, 4, 2, 8)]
        self.into = cache_writer_triton.StoreInto(store, *self.caches, writer._launches)

    def __call__(self, key, value, slots):
        """Whether the call found how to launch, and what it launched then."""
        before, first = len(self.again), len(self.kernel.launches)
        self.into(key, value, slots)
        assert (len(self.again) - before) + (len(self.kernel.launches) - first) <= 1
        return self.again[-1] if len(self.again) > before and len(self.kernel.launches) == first else None


def new_tokens(count, heads=2, size=8, dtype=torch.float32):
    return [torch.zeros(count, heads, size, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("latent", [False, True])
def test_tokens_of_a_known_kind_are_stored_into_the_same_caches(monkeypatch, latent):
    """Of any number, by their own addresses."""
    stored = Stored(monkeypatch, latent)
    for count in (4, 7, 1):
        key, value = new_tokens(count + 1)
        value, slots = key if latent else value, torch.arange(count)
        launched = stored(key, value, slots)
        first = stored.kernel.launches[0]
        if count == 4:
            assert launched is None
        else:
            assert launched == (count, 1, *addresses([key, value, *stored.caches, slots]), *first[6:])
    assert len(stored.kernel.launches) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda key, value, slots: (torch.zeros(65)[1:].view(4, 2, 8), value, slots),  # another address modulo 16
        lambda key, value, slots: (key.bfloat16(), value, slots),
        lambda key, value, slots: (key, value.bfloat16(), slots),
        lambda key, value, slots: (torch.zeros(4, 3, 9)[:, :2, 1:], value, slots),  # other strides
        lambda key, value, slots: (key, torch.zeros(4, 3, 8)[:, :2], slots),
        lambda key, value, slots: (key, key, slots),
        lambda key, value, slots: (torch.nn.Parameter(key), value, slots),
    ],
)
def test_tokens_of_another_kind_are_looked_at(monkeypatch, change):
    stored = Stored(monkeypatch)
    given = *new_tokens(4), torch.arange(4)
    stored(*given)
    assert stored(*given) is not None
    assert stored(*change(*given)) is None


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda key, value, slots: (key[:3], value, slots), ValueError, "^key: 3 tokens"),
        (lambda key, value, slots: (key, value[:3], slots), ValueError, "^value: 3 tokens"),
        (lambda key, value, slots: (torch.zeros(4, 1, 8), value, slots), ValueError, "^key: shape"),
        (lambda key, value, slots: (key, torch.zeros(4, 2, 7), slots), ValueError, "^value: shape"),
        (lambda key, value, slots: (key[0], value, slots), ValueError, "^key: shape"),
        (lambda key, value, slots: (key, value, torch.arange(8)[::2]), ValueError, "^slot_mapping: stride 2"),
        (lambda key, value, slots: (key, value, slots.int()), ValueError, "^slot_mapping: torch.int32"),
        (lambda key, value, slots: (key, value, slots.view(2, 2)), ValueError, "^slot_mapping: torch.int64"),
        (lambda key, value, slots: (key.to_sparse(), value, slots), ValueError, "^key: "),
        (lambda key, value, slots: (None, value, slots), TypeError, "^key: NoneType"),
        (lambda key, value, slots: (Liar(key), value, slots), TypeError, "^key: Liar"),
    ],
)
def test_what_a_kernel_would_read_outside_of_is_refused_among_known_kinds(monkeypatch, change, error, named):
    stored = Stored(monkeypatch)
    given = *new_tokens(4), torch.arange(4)
    stored(*given)
    stored(*given)
    with pytest.raises(error, match=named):
        stored(*change(*given))
    assert len(stored.again) == 1


class Liar:
    """No tensor, but an object that has what is asked of one, with an address of its own."""

    def __init__(self, tensor, **others):
        self.shape, self.dtype, self.device, self.stride = tensor.shape, tensor.dtype, tensor.device, tensor.stride
        self.dim, self.is_cuda = tensor.dim, True
        vars(self).update(others)

    def __len__(self):
        return self.shape[0]

    def data_ptr(self):
        return 4096


@pytest.mark.parametrize(
    ("spoilt", "named"),
    [
        (lambda tensor: tensor.numpy(), "ndarray"),  # of the shape that the writer knows
        (lambda tensor: Liar(tensor, data_ptr=None), "Liar"),
        (lambda tensor: Liar(tensor, stride=lambda: [16, 8, 1]), "Liar"),  # which cannot be looked up
    ],
)
@pytest.mark.parametrize("index", [0, 1, 2, 3, 4])
def test_what_has_not_all_of_a_tensor_is_none(monkeypatch, spoilt, named, index):
    monkeypatch.setattr(cache_writer_triton, "store_both", Kernel())
    monkeypatch.setattr(cache_writer_triton, "prepared_launch", lambda *_: pytest.fail)
    given, kept = [*new_tokens(4), *torch.zeros(2, 3, 4, 2, 8), torch.arange(4)], {}
    cache_writer_triton.store(*given, 1.0, 1.0, 0.0, kept)
    given[index] = spoilt(given[index])
    with pytest.raises(TypeError, match=rf"^{NAMES[index]}: {named} found"):
        cache_writer_triton.store(*given, 1.0, 1.0, 0.0, kept)


def test_a_liar_among_known_kinds_is_no_tensor(monkeypatch):
    """By the writer's own call, too."""
    monkeypatch.setattr(cache_writer_triton, "store_both", Kernel())
    monkeypatch.setattr(cache_writer_triton, "prepared_launch", lambda *_: pytest.fail)
    given, kept = (*new_tokens(4), *torch.zeros(2, 3, 4, 2, 8), torch.arange(4)), {}
    cache_writer_triton.store(*given, 1.0, 1.0, 0.0, kept)
    assert kept
    with pytest.raises(TypeError, match=r"^key: Liar"):
        cache_writer_triton.store(Liar(given[0]), *given[1:], 1.0, 1.0, 0.0, kept)


def test_caches_that_have_other_memory_are_looked_at(monkeypatch):
    stored = Stored(monkeypatch)
    given = *new_tokens(4), torch.arange(4)
    stored(*given)
    stored.into._caches[0].set_(torch.zeros(3, 4, 2, 8))
    assert stored(*given) is None
    stored.caches[1].resize_(1)  # the caller's own tensor: its shape is not ours
    assert stored(*given) is not None
