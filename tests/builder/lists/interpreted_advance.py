"""Run with TRITON_INTERPRET=1: steps that the kernel moved on have the fields of a build, on tensors of their own."""

import random

import torch
from builder.lists.decodes import decodes, fields

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder
from attncore.builder.lists import advanced_arrays, triton_advance
from attncore.reference import ReferenceBackend

triton_advance._ROWS = 4  # several programs
calls, advance_rows = [], triton_advance.advance_rows


def counted(tensors, *others):
    calls.append(sorted(tensors))
    advance_rows(tensors, *others)


triton_advance.advance_rows = counted
advanced_arrays.runs_kernels = lambda tensor: True


class Apart(ReferenceBackend):
    """Its tensors do not share memory with the host's arrays, as on a device."""

    def from_host(self, array):
        return torch.from_numpy(array.copy())


def steps_are_equal(seed):
    rng = random.Random(seed)
    block_size, layout = rng.choice([1, 3, 4, 16]), rng.choice(["common", "flash", "flashinfer", "rocm"])
    rows = []
    for _ in range(rng.randint(1, 11)):
        context = rng.randint(0, 30)
        table = [rng.randint(0, 2**31 - 1) for _ in range(-(-(context + 9) // block_size) + 1)]
        rows.append((context, table))
    pad = rng.choice([-1, 0, 3])
    backend = Apart(BackendConfig(2, 1, 8, "float32", block_size))
    builder = CommonMetadataBuilder(block_size, layout, max_seq_len_to_capture=64, backend=backend)
    metadata = builder.build(decodes(rows), pad)
    if seed % 4:
        fields(metadata)  # all fields are on the device; otherwise those that the kernel needs, and one more
    held = metadata.seq_lens, metadata.block_table, metadata.slot_mapping
    for step in range(1, 8):
        metadata.advance_step()
        longer = [(context + step, table) for context, table in rows]
        own = {name: value.clone() for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
        fresh = builder.build(decodes(longer), pad)
        for name, value in own.items():
            assert torch.equal(value, getattr(fresh, name)), (seed, step, name)
        assert held[0] is metadata.seq_lens
        assert held[2] is metadata.slot_mapping
        if not seed % 3:
            assert fields(metadata) == fields(fresh)


for number in range(40):
    steps_are_equal(number)
assert len(calls) == 40 * 7, len(calls)
assert ["block_table", "seq_lens", "slot_mapping"] in calls
assert max(map(len, calls)) == 7

# What the device has not: a trimmed table, a block that was appended since the build.
calls.clear()
one = Apart(BackendConfig(2, 1, 8, "float32", 4))
windowed = CommonMetadataBuilder(4, sliding_window=5, backend=one).build(decodes([(6, [1, 2, 3])]))
fields(windowed)
windowed.advance_step()
table = [5, 6]
grown = CommonMetadataBuilder(4, backend=one).build(decodes([(7, table)]))
fields(grown)
table.append(9)
grown.advance_step()
assert not calls
assert grown.slot_mapping.tolist() == [36]
print("equal")
