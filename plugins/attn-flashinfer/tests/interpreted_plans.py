"""Run with TRITON_INTERPRET=1: the kernel writes what a plan in plain Python does, over random batches and settings.

interpreted_plans.py [BATCHES [SEED]]
"""

import random
import sys

import numpy as np
import torch
from attn_flashinfer import device_plan
from attn_flashinfer.device_plan import DevicePlan, Sizes
from flashinfer_standin_plan import PlanFacts, write_plan

BATCHES, SEED = (int(one) for one in (*sys.argv[1:], *("400", "0")[len(sys.argv) - 1 :]))
NBYTES = 1 << 15
draw = random.Random(SEED)


def facts() -> PlanFacts:
    tensor_cores = draw.random() < 0.65
    kv_heads = draw.choice((1, 2, 4, 8))
    return PlanFacts(
        num_reqs=draw.choice((1, 2, 3, 8, 15, 16, 17, 33, 64)),
        query_len=draw.choice((1, 1, 2, 4, 7, 40)) if tensor_cores else 1,
        num_heads=kv_heads * draw.choice((1, 4, 8, 16)),
        num_kv_heads=kv_heads,
        page_size=draw.choice((1, 4, 16, 64, 256)),
        window_left=draw.choice((-1, -1, 0, 31, 127, 1000)),
        head_size=draw.choice((64, 128, 256)),
        tensor_cores=tensor_cores,
        blocks_each=draw.choice((1, 4, 16)),
        processors=draw.choice((4, 11, 132)),
    )


def batch(rows: int, kind: int | None) -> list[int]:
    most = 900 if kind is not None else draw.choice((1, 7, 60, 900))
    kind = draw.randrange(6) if kind is None else kind
    counts = {
        0: lambda _: most,
        1: lambda _: 1,
        2: lambda _: draw.randint(1, most),
        3: lambda _: 0 if draw.random() < 0.3 else draw.randint(1, most),
        4: lambda row: draw.randint(1, most) if row < rows // 2 else 0,
        5: lambda _: most * (draw.random() < 0.1),
    }[kind]
    return [0, *np.cumsum([counts(row) for row in range(rows)]).tolist()]


seen = set()
for number in range(BATCHES):
    one, searched = facts(), number % 3 == 0  # fewer rows than blocks, of many pages each
    if searched:
        one = PlanFacts(draw.choice((8, 33, 64)), 1, 4, 1, 16, tensor_cores=draw.random() < 0.5, processors=132)
    sizes = Sizes(
        one.num_reqs, one.query_len, one.num_heads, one.num_kv_heads, one.page_size, one.window_left, one.processors
    )
    seen.add((one.tensor_cores, one.query_len > 1, one.window_left >= 0))
    # Two plan keys in one launch: the second one without the window, or with the widest.
    both = [one, PlanFacts(**{**vars(one), "window_left": (-1, 2**31 - 2)[number % 2]})]
    expected = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in both]
    written = [torch.full((NBYTES,), 0x7F, dtype=torch.uint8) for _ in both]
    indptr = batch(one.num_reqs, 2 if searched else None)
    layouts, rows = [], []
    for each, memory, empty in zip(both, expected, written, strict=True):
        each_sizes = sizes._replace(window_left=each.window_left)
        layouts.append(device_plan.layout_of(write_plan(indptr, each, memory.numpy()), each_sizes))
        rows.append(device_plan.table_row(layouts[-1], each_sizes, empty.data_ptr()))
    DevicePlan(torch.tensor(indptr, dtype=torch.int32), rows)()
    for layout, memory, filled in zip(layouts, expected, written, strict=True):
        found = device_plan.words_that_run_reads(filled, layout, sizes)
        for name, array in device_plan.words_that_run_reads(memory, layout, sizes).items():
            assert torch.equal(array, found[name]), (name, one, indptr, array.tolist(), found[name].tolist())
        kept = filled == 0x7F
        assert int(kept.sum()) >= NBYTES - sum(array.nbytes for array in found.values()), "more was written"
assert len(seen) == 6 or BATCHES < 100, seen
print("equal")
