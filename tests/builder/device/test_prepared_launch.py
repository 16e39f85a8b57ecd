"""A compiled Triton kernel is launched as Triton does it itself, or its own way where that is another."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from attncore.builder.device import prepared_launch as module

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
