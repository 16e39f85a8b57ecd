"""attncore's cache writer, whose kernel this backend relies on: in Triton's interpreter, and on a GPU."""

import os

import pytest
import torch

from attncore.ops import cache_writer_triton as cache_kernels

DEVICE = "cuda" if os.environ["ATTNCORE_ROCM_DEV_DEVICE"] == "cuda" else "cpu"


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_slots(layout, dtype, tensors):
    """Every token lands in its slot, slots of -1 or past the end change nothing, fp8 is divided and cut off."""
    heads, size, page = 3, 24, 4
    random = torch.Generator().manual_seed(1)
    key, value = (500 * torch.randn(7, heads, size, generator=random) for _ in range(2))
    if DEVICE == "cpu" and dtype is not torch.float32:
        # Triton 3.6's interpreter does not carry where it rounds to fp8 (124 becomes 64): nothing is to be rounded.
        key, value = (part.to(dtype).float() * scale for part, scale in ((key, 2.0), (value, 4.0)))
    caches = torch.zeros(2, 6, page, heads, size).to(dtype).to(DEVICE)
    if layout == "HND":
        caches = torch.zeros(2, 6, heads, page, size).to(dtype).to(DEVICE).transpose(2, 3)
    slots = torch.tensor([5, -1, 0, 23, 8, 24, 2**40])
    fp8 = dtype is not torch.float32
    largest = torch.finfo(dtype).max if fp8 else 0.0
    scales = (2.0, 4.0) if fp8 else (1.0, 1.0)
    if tensors:  # of all heads, and of each
        scales = (torch.tensor(scales[:1], device=DEVICE), torch.tensor([scales[1]] * heads, device=DEVICE))
        scales[1][1] *= 2
        value[:, 1] *= 2 if fp8 else 1
    cache_kernels.store(
        key.to(DEVICE), value.to(DEVICE), caches[0], caches[1], slots.to(DEVICE), *scales, largest
    )  # fmt: skip
    if tensors and fp8:
        value[:, 1] /= 2
    for new, scale, cache in ((key, 2.0, caches[0]), (value, 4.0, caches[1])):
        wanted = torch.zeros(24, heads, size)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < 24:
                wanted[slot] = (new[token] / scale).clamp(-largest, largest).to(dtype).float() if fp8 else new[token]
        assert torch.equal(cache.float().cpu().reshape(24, heads, size), wanted)


def test_strides_whose_products_are_beyond_int32():
    """A view of a pool in which heads are outermost. Little of its memory is touched."""
    heads, size, page = 3, 16, 4
    key = torch.randint(-8, 8, (3, heads, size)).float().to(DEVICE)
    pool = torch.empty(2**31 + 2 * page * size, dtype=torch.float8_e5m2, device=DEVICE)
    cache = pool.as_strided((2, page, heads, size), (page * size, size, 2**30, 1))
    slots = torch.tensor([6, 0, 3], device=DEVICE)
    cache_kernels.store(key, key, cache, cache, slots, 1.0, 1.0, torch.finfo(cache.dtype).max)
    assert torch.equal(torch.stack([cache[slot // page, slot % page] for slot in slots.tolist()]).float(), key)
