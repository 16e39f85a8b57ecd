"""Run with TRITON_INTERPRET=1: the kernel merges what merge_attention does, and writes to nothing else."""

import torch

from attncore.merge import merge_attention
from attncore.ranks.merge_kernel import merge

generator = torch.Generator().manual_seed(0)
INFINITY = float("inf")

for ranks, tokens, heads, size, dtype in (
    (1, 3, 2, 8, torch.float32), (2, 5, 3, 6, torch.float16), (4, 1, 1, 1, torch.float32), (3, 2, 4, 16, torch.bfloat16)
):  # fmt: skip
    outputs = torch.randn((ranks, tokens, heads, size), generator=generator).to(dtype)
    lses = 30 * torch.randn((ranks, tokens, heads), generator=generator)
    lses[0, 0] = -INFINITY  # no key on the first rank, whose output may hold anything
    outputs[0, 0] = torch.nan
    lses[-1, 0, 0] = INFINITY  # other kernels say so
    lses[:, -1, -1] = -INFINITY  # no key anywhere
    if tokens > 2:
        lses[0, 1, 0] = torch.nan
    wide = torch.full((tokens, heads + 1, size + 1), 7.0, dtype=dtype)
    found = wide[:, :heads, :size]
    lse = merge(outputs, lses, found)
    expected, expected_lse = merge_attention(outputs.unbind(), lses.unbind())
    torch.testing.assert_close(
        found, expected, atol=2e-6, rtol=1e-5 if dtype == torch.float32 else 2e-2, equal_nan=True
    )
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)
    assert (wide[:, heads] == 7).all()
    assert (wide[:, :, size] == 7).all()

# Parts that are together beyond int32, each within it. Little of their memory is touched.
outputs = torch.empty(2**31 + 8, dtype=torch.float16).as_strided((3, 1, 1, 8), (2**30, 8, 8, 1))
outputs.copy_(torch.randn(outputs.shape, generator=generator))
lses, found = torch.randn((3, 1, 1), generator=generator), torch.empty((1, 1, 8), dtype=torch.float16)
merge(outputs, lses, found)
torch.testing.assert_close(found, merge_attention(outputs.unbind(), lses.unbind())[0], atol=1e-3, rtol=1e-3)
print("equal")
