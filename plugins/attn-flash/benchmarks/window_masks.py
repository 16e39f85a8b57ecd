"""Whether vLLM's build of FlashAttention 3 masks every key behind a query in layers with a window, and what it costs to
have all tiles masked (docs/design/flash-attention-3.md). On a Hopper GPU, with vLLM's library file:

    python window_masks.py SECONDS SEED

Random windows, lengths, head sizes and groups, each with and without ends of rows, against float32; then times.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from typing import Any

import torch
from attn_flash import generation3_vllm
from attn_flash.generation3 import BEFORE_ALL
from torch import Tensor

PAGE = 16
TIMED = [  # query heads, key/value heads, head size, window
    (32, 8, 128, 4096), (32, 8, 128, 1024), (16, 8, 256, 1024), (32, 32, 96, 2047), (64, 8, 64, 128), (64, 8, 128, 128),
]  # fmt: skip


class Call:
    """A row of ``count`` tokens behind ``context`` others, over pages in order."""

    def __init__(self, count: int, context: int, heads: int, kv_heads: int, size: int, window: int) -> None:
        self.count, self.context, self.window, self.scale = count, context, window, size**-0.5
        pages = -(-(count + context) // PAGE)
        where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(count, heads, size, **where)
        self.keys, self.values = (torch.randn(pages, PAGE, kv_heads, size, **where) for _ in range(2))
        self.starts, self.lengths = (
            torch.tensor(one, dtype=torch.int32, device="cuda") for one in ([0, count], [count + context])
        )
        self.ends = torch.full((1,), BEFORE_ALL, dtype=torch.int32, device="cuda")
        self.table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
        self.library = generation3_vllm.load()

    def run(self, masks_all: bool) -> Tensor:
        sizes = self.count, self.count + self.context
        given = (self.starts, None, None, None, self.lengths, *sizes, self.table, *[None] * 5, None, None, None)
        fixed = (self.scale, True, self.window - 1, 0, *self.library.before_cap, 0.0, True)
        last = (0, None, 0, *self.library.last(None, self.ends if masks_all else None))
        caches = (self.keys, self.values, None, None, None, None)
        found: Tensor = self.library.forward(self.query, *caches, *given, *fixed, None, *last)[0]
        return found

    def expected(self) -> Tensor:
        length, each = self.count + self.context, self.query.shape[1] // self.keys.shape[2]
        keys, values = (
            part.flatten(0, 1)[:length].float().repeat_interleave(each, 1) for part in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", self.query.float(), keys) * self.scale
        behind = torch.arange(length, device="cuda")
        distance = behind[self.context :, None] - behind
        scores.masked_fill_((distance < 0) | (distance >= self.window), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def compare(seconds: float, draw: random.Random) -> dict[str, int]:
    """How many random calls there were, and how many of them were wrong."""
    found = dict.fromkeys(("calls", "wrong", "wrong with all tiles masked"), 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        size, kv_heads, each = draw.choice([64, 96, 128, 192, 256]), draw.choice([1, 2]), draw.choice([1, 2, 3, 4, 8])
        count, context = draw.choice([2, 5, 70, 600, 1300, 2500]), draw.choice([0, 0, 100, draw.randrange(3000)])
        window = draw.choice([128, 300, 512, 1000, 1024, 2047, draw.randrange(2, 1500)])
        call = Call(count, context, kv_heads * each, kv_heads, size, window)
        expected = call.expected()
        found["calls"] += 1
        for name, masks_all in (("wrong", False), ("wrong with all tiles masked", True)):
            if masks_all and window >= count + context:
                continue  # no window to the kernel: the layers give no ends then
            found[name] += bool((call.run(masks_all).float() - expected).abs().max() > 0.03)
    return found


def milliseconds(call: Call, masks_all: bool) -> float:
    times = []
    for turn in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call.run(masks_all)
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if turn > 4 else []
    return statistics.median(times)


def main() -> None:
    seconds, seed = map(int, sys.argv[1:])
    torch.manual_seed(seed)
    print(compare(seconds, random.Random(seed)))
    for heads, kv_heads, size, window in TIMED:
        call = Call(8192, 0, heads, kv_heads, size, window)
        pairs = [(milliseconds(call, False), milliseconds(call, True)) for _ in range(3)]
        left, masked = (statistics.median(one) for one in zip(*pairs, strict=True))
        what = f"num_heads {heads} over {kv_heads}, size {size}, window {window}"
        print(f"{what}: {left:.3f} ms, all tiles masked {masked / left:.3f} of it")


if __name__ == "__main__":
    main()
