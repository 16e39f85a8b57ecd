"""Writing a step's keys and values to a paged cache on a CUDA device, host and device time.

``CacheWriter``, the same kernel by Triton's own launch, and torch's indexing. Medians, microseconds.

    python benchmarks/cache_writer.py
"""

import statistics
import time

import torch

from attncore import CacheWriter
from attncore.ops.cache_writer_triton import store

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 4096, 16, 8, 128


def host_us(call, rounds=20, each=100):
    for _ in range(50):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            call()
        found.append((time.perf_counter() - start) / each * 1e6)
    return statistics.median(found)


def device_us(call, each=100):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(each):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / each * 1e3


def main():
    cache = torch.zeros(BLOCKS, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    keys, values = cache[:, 0], cache[:, 1]
    for tokens in (1, 256, 8192):
        key = torch.randn(tokens, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
        value, slots = torch.randn_like(key), torch.randperm(BLOCKS * BLOCK_SIZE, device="cuda")[:tokens]
        given = key, value, keys, values, slots

        def indexing(key=key, value=value, slots=slots):
            block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
            keys[block, offset], values[block, offset] = key, value

        writer = CacheWriter()
        ways = {
            "CacheWriter": lambda given=given, writer=writer: writer(*given),
            "Triton's launch": lambda given=given: store(*given, 1.0, 1.0, 0.0),
            "torch's indexing": indexing,
        }
        times = ", ".join(f"{name} {host_us(call):.1f}" for name, call in ways.items())
        print(f"{tokens} tokens: {times}; on the device {device_us(ways['CacheWriter']):.1f}", flush=True)


if __name__ == "__main__":
    main()
