"""The bare collectives of a step, in one CUDA graph: what several ranks take beyond what each of them computes."""

import statistics
import time

import torch
import torch.distributed as dist

from attncore.graphs import capturing, new_graph

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def collectives_us(call, device, rounds=30):
    """Microseconds of ``call``, which makes all collectives of a step: the median of ``rounds``, on every rank. In one
    graph, by CUDA events; without CUDA as it is, on the host's clock."""
    on_gpu = device.startswith("cuda")
    for _ in range(3):
        call()
    run = call
    if on_gpu:
        torch.cuda.synchronize()
        graph = new_graph(device)
        with capturing(graph):
            call()
        run = graph.replay
    dist.barrier()
    times = [_timed(run, on_gpu) for _ in range(rounds + 3)][3:]
    return statistics.median(times)


def _timed(run, on_gpu):
    if not on_gpu:
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
