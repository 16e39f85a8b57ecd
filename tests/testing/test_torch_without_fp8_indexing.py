"""torch 2.7, the oldest that attncore takes, indexes no fp8 on a CPU: the kit does not ask it to.

Later ones do, so that its errors are played here.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attncore
from attncore.testing.engines import moved_caches

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NOT_THERE = {torch.ops.aten.index.Tensor, torch.ops.aten.where.self}


class OldestTorch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs))
        if func in NOT_THERE and any(isinstance(one, torch.Tensor) and one.dtype in FP8 for one in given):
            raise RuntimeError(f'"{func}" not implemented for fp8')
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("check", ["check_copied_blocks", "check_swapped_blocks", "check_moved_slots"])
def test_blocks_and_slots_of_an_fp8_cache_are_checked(check, kv_cache_dtype):
    backend = attncore.select(
        num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", kv_cache_dtype=kv_cache_dtype, backend="reference"
    ).create(device="cpu")
    with OldestTorch():
        with pytest.raises(RuntimeError, match="not implemented for fp8"):
            backend.allocate_kv_cache(2)[:, torch.tensor([1])]
        getattr(moved_caches, check)(backend)
