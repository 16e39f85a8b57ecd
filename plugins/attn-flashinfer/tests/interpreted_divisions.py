"""Quotients of the kernel that plans, beside Python's; run with TRITON_INTERPRET=1 where there is no CUDA device."""

import sys

import torch
import triton
import triton.language as tl
from attn_flashinfer.plan_kernel import _divided_up

BLOCK = 1024


@triton.jit
def _divide(numbers, divisors, results, block: tl.constexpr):
    divisor = tl.load(divisors + tl.program_id(0))
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(results + place, _divided_up(tl.load(numbers + place), divisor))


def differ(device: str, count: int) -> int:
    """How many of ``count`` times 1024 quotients are wrong: around multiples of a divisor, and anywhere below."""
    random = torch.Generator().manual_seed(count)
    sizes = torch.randint(0, 30, (count,), generator=random)
    divisors = 1 + (torch.rand(count, generator=random, dtype=torch.float64) * 2.0**sizes).long()
    most = torch.minimum(torch.tensor(2**21), (2**31 - 1 - 2 * divisors) // divisors)
    quotients = (torch.rand(count, BLOCK, generator=random, dtype=torch.float64) * most[:, None]).long()
    quotients[:, :8] = most[:, None] - torch.arange(8)
    rest = torch.randint(-1, 2, (count, BLOCK), generator=random)
    rest[:, BLOCK // 2 :] = (torch.rand(count, BLOCK // 2, generator=random) * divisors[:, None]).long()
    numbers = (quotients * divisors[:, None] + rest).clamp(min=0)
    expected = (numbers + divisors[:, None] - 1) // divisors[:, None]
    found = torch.full((count, BLOCK), -1, dtype=torch.int32, device=device)
    _divide[(count,)](numbers.int().to(device), divisors.int().to(device), found, block=BLOCK)
    return int((found.cpu() != expected).sum())


if __name__ == "__main__":
    sys.exit(f"{wrong} differ" if (wrong := differ("cpu", 200)) else print("equal"))
