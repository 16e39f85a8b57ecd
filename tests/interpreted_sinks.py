"""Run with TRITON_INTERPRET=1: sinks are added to heads that are further apart than int32 holds as to any others."""

import torch

from attncore.ops.sinks_by_lse_triton import add_sinks

torch.manual_seed(0)
output, lse, sinks = torch.randn(2, 3, 16).half(), torch.randn(2, 3), torch.randn(3)
expected, expected_lse = output.clone(), lse.clone()
add_sinks(expected, expected_lse, sinks, False, {})
far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 3, 16), (16, 2**30, 1))  # little of it is touched
far.copy_(output)
add_sinks(far, lse, sinks, False, {})
assert not torch.equal(expected, output)
assert torch.equal(far, expected)
assert torch.equal(lse, expected_lse)
print("equal")
