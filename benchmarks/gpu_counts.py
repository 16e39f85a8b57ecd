"""What a step asks of the driver (``counts``), where its host time goes (``pieces``), what stays still (``steady``)."""

import re
from collections import Counter
from functools import partial

import builder_insides
import torch
from gpu_work import FIELDS, Backend, Shape, Stopwatch, Work, calls, step_times, synchronize, transports, us

SHAPE = Shape("decode 256", "8k", 256)


def four(args, **options):
    """(what, Work): both transports, eager and captured."""
    for transport in transports(args.device):
        for graph in (False, True):
            work = Work(SHAPE, args.device, transport, Backend(args.device), graph=graph, **options)
            yield f"{transport}, {'captured' if graph else 'eager'}", work


def profiled(work, steps):
    """What the host called, and what the device ran, in so many steps."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        for _ in range(steps):
            work.prepare()
            work.step()
        synchronize()
    on_host, on_device = Counter(), Counter()
    for event in run.events():
        if str(event.device_type).endswith("CUDA"):
            on_device[event.name[:60]] += 1
        elif re.match(r"cuda[A-Z]|cu[A-Z]", event.name):
            on_host[event.name] += 1
    return on_host, on_device


def counts(args):
    """Calls of the driver a step; those of a profile without a step are taken off."""
    rows, steps = [], 20
    for what, work in four(args):
        step_times(work, 3)
        profiled(work, 1)
        nothing, _ = profiled(work, 0)
        on_host, on_device = profiled(work, steps)
        made = {name: (n - nothing[name]) / steps for name, n in on_host.items() if n != nothing[name]}
        rows.append({"what": what, "calls": made, "device": {name: n / steps for name, n in on_device.items()}})
        print(rows[-1], flush=True)
    return rows


def pieces(args):
    """Microseconds of the methods that a step passes through, inner ones included; each clock itself adds 0.2."""
    rows = []
    for what, work in four(args):
        builder, side, watches = work.builder, builder_insides.side(work.builder), {}
        row = {"what": what, "whole step": us(step_times(work, 300))}
        row["receipt check, arena free"] = calls(partial(side.wait, work.metadata.step))
        for owner, names in builder_insides.methods_of_a_step(builder):
            for name in names:
                if hasattr(owner, name):
                    watches[f"{type(owner).__name__}.{name}"] = Stopwatch(owner, name)
        graphs = [work.model] if work.model else builder_insides.graphs_of_the_transport(builder)
        for number, graph in enumerate(graphs):
            watches[f"graph {number}.replay"] = Stopwatch(graph, "replay")
        row["whole step with clocks"] = us(step_times(work, 300))
        row |= {name: us(watch.taken) for name, watch in watches.items() if watch.taken}
        rows.append(row)
        print(*(f"  {name}: {value}" for name, value in row.items()), sep="\n", flush=True)
    return rows


def steady(args):
    """1,000 steps: synchronisations raise; blocks allocated, and where fields lie, before and after."""
    rows, steps = [], 100 if args.quick else 1000
    for what, work in four(args, depth=3):
        step_times(work, 20)
        before, addresses = memory(), set()
        if args.device != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(steps):
                work.prepare()
                work.step()
                addresses.add(tuple(getattr(work.metadata, name).data_ptr() for name in FIELDS))
        finally:
            if args.device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        after = memory()
        growth = {name: after[name] - before[name] for name in before}
        rows.append({"what": what, "steps": steps, "places_of_fields": len(addresses), "growth": growth})
        print(rows[-1], flush=True)
    return rows


def memory():
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    names = ("allocation.all.current", "allocation.all.allocated", "segment.all.current", "reserved_bytes.all.current")
    return {name: stats.get(name, 0) for name in names}
