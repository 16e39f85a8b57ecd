"""Steps whose tensors lie where those of a step before did make page lists by a launch that was prepared for them."""

import pytest
import torch
from builder.adopted.adopted_engine import BLOCK, as_on_a_device
from builder.adopted.test_adopted_captures import PersistentBuffers, backend_of, steps_of
from interrupted_calls import AtOpcode

from attncore.builder.adopted.given import Given

if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch has no functions for DLPack: each step is searched", allow_module_level=True)

LENGTHS = ([5, 9, 2, 1], [60, 1, 1, 33], [6, 10, 3, 2], [7, 33, 2, 59])


class SumsByTorch:
    """In place of the kernel, which a CPU has not: the same words, by torch."""

    def __init__(self, fields):
        self.fields, self.made = fields, []

    def __call__(self, seq_lens, table, pages, columns, longest):
        self.made.append("called")
        self._make(seq_lens, table, pages, columns, longest)

    def prepared(self, *tensors):
        def launch(longest):
            self.made.append("prepared")
            self._make(*tensors, longest)

        return launch

    def _make(self, seq_lens, table, pages, columns, longest):
        given = Given(seq_lens, seq_lens, table, seq_lens)
        self.fields._make_sums_in_torch(given, columns, 0 if pages is None else min(longest, columns))


class Engine:
    """Persistent buffers and new host tensors in each step; ``size`` rows, of which some may be padding."""

    def __init__(self, *, size=4, on_device=True, **facts):
        self.buffers, self.size = PersistentBuffers(), size
        self.steps = steps_of(backend_of(device_needs={"paged_kv_indices"}, **facts))
        if on_device:
            as_on_a_device(self.steps)
        self.kernel = self.steps._fields._sum_lengths = SumsByTorch(self.steps._fields)

    def build(self, lengths):
        given = self.buffers.fill(lengths, self.size)
        hosts = {
            f"host_{name}": torch.from_numpy(given[name].numpy().copy()) for name in ("query_start_loc", "seq_lens")
        }
        return self.steps.build(**given, **hosts)

    def check(self, lengths):
        """Page lists on the device are those of these lengths."""
        counts = [-(-length // BLOCK) for length in lengths]
        sums = self.steps._fields.sums(self.size)
        pointers = sums["paged_kv_indptr"].tolist()
        assert pointers[1 : 1 + len(counts)] == torch.tensor(counts).cumsum(0).tolist()
        wanted = torch.cat([self.buffers.table[row, :count] for row, count in enumerate(counts)])
        assert self.steps._fields.page_buffer[: len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_later_steps_of_the_same_tensors_launch_what_was_prepared(captured, on_device):
    engine = Engine(on_device=on_device)
    if captured:
        engine.steps.capture(4)
    for turn, lengths in enumerate(LENGTHS * 3):
        engine.kernel.made.clear()
        engine.build(lengths)
        engine.check(lengths)
        assert turn < 3 or engine.kernel.made == ["prepared"]


def test_tensors_that_moved_are_prepared_anew():
    engine = Engine()
    for _ in range(3):
        for lengths in LENGTHS:
            engine.build(lengths)
        assert engine.kernel.made[-1] == "prepared"
        engine.buffers = PersistentBuffers()
        engine.build([3, 17, 4, 1])
        assert engine.kernel.made[-1] == "called"
        for lengths in LENGTHS:
            engine.build(lengths)
            engine.check(lengths)


def test_a_field_that_is_asked_for_later_is_made_beside_them():
    engine = Engine()
    for lengths in LENGTHS:
        metadata = engine.build(lengths)
    assert metadata.positions.tolist() == [length - 1 for length in LENGTHS[-1]]
    for lengths in LENGTHS:
        metadata = engine.build(lengths)
        assert engine.steps._fields.other("positions", metadata._given).tolist() == [one - 1 for one in lengths]
        engine.check(lengths)


def test_rows_that_are_lent_keys_take_the_longer_way():
    engine = Engine(pad_seq_len=1)
    engine.steps.capture(4)
    for lengths in ([5, 9], [6, 10], [7], [8, 12, 2]) * 2:
        metadata = engine.build(lengths)
        assert metadata.seq_lens.tolist() == lengths + [1] * (4 - len(lengths))
    assert "prepared" not in engine.kernel.made


def test_a_build_behind_an_interrupted_one_is_right():
    """Interrupted before each opcode. What the engine's tensors were before is not known to anybody then."""
    engine, opcode, fired = Engine(), 0, True
    for lengths in LENGTHS:
        engine.build(lengths)
    while fired:
        last = engine.steps.last_step
        with AtOpcode(opcode) as interrupt:
            engine.build(LENGTHS[opcode % 4])
        fired = interrupt.fired
        metadata = engine.build(LENGTHS[(opcode + 1) % 4])
        assert metadata.step in (last + 1, last + 2)
        engine.check(LENGTHS[(opcode + 1) % 4])
        opcode += 1
    assert opcode > 100
