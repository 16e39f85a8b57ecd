"""Run with TRITON_INTERPRET=1: the kernel of adopted steps gives what torch does, and writes to nothing else."""

import torch

from attncore.builder.adopted.device_fields import DeviceFields
from attncore.builder.adopted.given import Given
from attncore.builder.adopted.settings import Settings
from attncore.builder.device import triton_kernels

triton_kernels._ROWS, triton_kernels._PAGES_BLOCK = 8, 4  # a kernel of a few rows goes over them more than once
SIZE, MOST, ROWS, COLUMNS = 4, 60, 20, 17
SETTINGS = Settings(
    max_num_reqs=ROWS, max_num_tokens=ROWS, max_model_len=MOST, num_blocks=200, decode_threshold=1, depth=2,
    block_size=SIZE, max_pages=MOST // SIZE,
)  # fmt: skip
generator = torch.Generator().manual_seed(0)


def fields(*, kernel):
    made = DeviceFields(torch.device("cpu"), SETTINGS, page_list=True)
    if kernel:
        made._sum_lengths = triton_kernels.SumLengths(made._words, SETTINGS.gap, SIZE)
    made._words.fill_(-7)
    made._pages.fill_(-7)
    return made


for count in (0, 1, 2, 7, 8, 9, 17, ROWS):
    for hostile in (False, True):
        lengths = torch.randint(0, MOST + 1, (count,), dtype=torch.int32, generator=generator)
        if hostile and count > 1:
            lengths[::2] = torch.tensor([-(2**31), 2**31 - 1, 61, -1], dtype=torch.int32).repeat(5)[: len(lengths[::2])]
        table = torch.randint(1, 1000, (ROWS, COLUMNS + 3), dtype=torch.int32, generator=generator)[
            :count, 1 : 1 + COLUMNS
        ]
        step = Given(torch.arange(count + 1, dtype=torch.int32), lengths, table, torch.arange(count))
        both = fields(kernel=False), fields(kernel=True)
        for one in both:
            one.make(step, MOST)
            one._pages[-1] = -7  # torch's own
        assert torch.equal(both[0]._words, both[1]._words), (count, hostile)
        assert torch.equal(both[0]._pages, both[1]._pages), (count, hostile)
        assert int((both[0]._pages != -7).sum()) == int(both[0].sums(count)["paged_kv_indptr"][-1])
        sums = fields(kernel=True)
        sums.live = frozenset(("seq_start_loc",))
        sums.make(step, MOST)
        assert torch.equal(sums._words, both[0]._words)
        assert bool((sums._pages == -7).all())
print("equal")
