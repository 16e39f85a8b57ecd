"""What a step costs: the host's time (``host``), and until the device is ready (``ready``)."""

import time

import torch
from builder_insides import assembly, backends, bytes_of_an_eager_step, side, take_longer_way, wrap_plan_and_send
from gpu_work import (
    Backend,
    DummyPlan,
    FlashInferPlan,
    Flush,
    Shape,
    Stopwatch,
    Work,
    p99,
    shapes,
    step_times,
    synchronize,
    transports,
    us,
)


def host(args):
    """Host microseconds of a step, the device idle before it; cold: 320 MB of other memory were written before it."""
    flush, hot, cold, rows = Flush(), 20 if args.quick else 200, 3 if args.quick else 8, []
    for shape in shapes():
        if args.quick and shape.context != "8k":
            continue
        for what, work in ways(shape, args):
            rows.append({"shape": str(shape), "what": what} | host_times(work, hot, cold, flush))
            print(rows[-1], flush=True)
    return rows


def ways(shape, args):
    """(what, a function that makes the Work) of everything a shape is timed with."""
    device = args.device
    yield "build", lambda: Work(shape, device, "none")
    for transport in transports(device):
        plans = {"": Backend, " + plan": DummyPlan}
        if args.flashinfer and shape.decodes in (64, 256):
            plans[" + FlashInfer's plan"] = lambda _: FlashInferPlan(device, shape.decodes, 1 << 21)
        for plan, make in plans.items():
            for graph in (False,) if shape.prefills else (False, True):
                what = f"build + commit{plan}, {transport}, {'captured' if graph else 'eager'}"
                yield (
                    what,
                    lambda make=make, transport=transport, graph=graph: Work(
                        shape, device, transport, make(device), graph=graph
                    ),
                )


def host_times(make, hot, cold, flush):
    """Hot and cold steps of a Work, and how long the parts of a hot one took; ``failed`` where it cannot be made."""
    started = time.perf_counter()
    try:
        work = make()
    except Exception as error:  # a library's own, such as a kernel that was not compiled ahead
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    row = {"start_up_s": round(time.perf_counter() - started, 2)}
    step_times(work, 5)
    times = step_times(work, hot)
    row |= {"hot": us(times), "p99": p99(times), "cold": us(step_times(work, cold, flush))}
    if work.transport != "none":
        take_longer_way(work.builder)
        send, plan = Stopwatch(side(work.builder), "send"), Stopwatch(backends(work.builder), "plan")
        replay = Stopwatch(assembly(work.builder), "replay")
        step_times(work, hot)
        row |= {"send": us(send.taken), "plan": us(plan.taken), "replay": us(replay.taken)}
    return row


class Copies:
    """Pinned arrays and where they go: one torch copy each."""

    def __init__(self, sizes, device):
        pinned = device != "cpu"
        self.pairs = [
            (torch.empty(n, dtype=torch.uint8, device=device), torch.zeros(n, dtype=torch.uint8, pin_memory=pinned))
            for n in sizes
        ]

    def __call__(self):
        for there, here in self.pairs:
            there.copy_(here, non_blocking=True)


def ready(args):
    """Microseconds until table and page indices are right on the device: decode 256, 16 new blocks a step, eager.

    Before each copy an engine's host step runs, as it does before a commit: both come to equally warm caches.
    """
    n, count, rows, device = 256, 20 if args.quick else 400, [], args.device
    for context in ("8k", "128k"):
        shape, timed = Shape(f"decode {n}", context, n), {}
        for transport in transports(device):
            work = Work(shape, device, transport, Backend(device))
            timed[f"build + commit, {transport}"] = ready_times(work.prepare, work.step, count, device)
            rounds = [commit_times(Work(shape, device, transport, Backend(device)), count, device) for _ in range(3)]
            rounds.sort(key=lambda row: row["issued"])
            timed[f"commit, {transport}"] = rounds[1] | {"rounds": [row["issued"] for row in rounds]}
        page_ids, width = int(work.metadata.host.paged_kv_indptr[-1]), work.batch.block_table.shape[1]
        ours = bytes_of_an_eager_step(work.builder) + 8 * 16
        arrays = [8 * n, 4 * n, 4 * (n + 1), 8 * n, 16 * 4 * width, 4 * (n + 1), 4 * page_ids, 4 * n]
        on_host = Work(shape, device, "none")

        def before(work=on_host):
            work.prepare()
            work.step()

        copies = {
            "eight pinned copies of the arrays": Copies(arrays, device),
            "eight pinned copies of our bytes": Copies([-(-ours // 8)] * 8, device),
            "one pinned copy of the arrays' bytes": Copies([sum(arrays)], device),
            "one pinned copy of our bytes": Copies([ours], device),
            "one pinned copy of the whole table": Copies([4 * n * width], device),
            "nothing (the clock)": lambda: None,
        }
        for what, call in copies.items():
            timed[what] = ready_times(before, call, count, device)
        rows += [{"shape": str(shape), "what": what} | row for what, row in timed.items()]
        rows.append({"shape": str(shape), "what": "bytes", "ours": ours, "arrays": sum(arrays), "table": 4 * n * width})
        print(*rows[-len(timed) - 1 :], sep="\n", flush=True)
    return rows


def ready_times(before, call, count, device):
    """Issued: the host's part. Done: until the device is. Device: from event to event, the device busy before."""
    issued, done, on_device = [], [], []
    stream = None if device == "cpu" else torch.cuda.current_stream()
    for _ in range(count):
        before()
        synchronize()
        start = time.perf_counter_ns()
        call()
        issued.append(time.perf_counter_ns() - start)
        if stream:
            stream.synchronize()
        done.append(time.perf_counter_ns() - start)
    for _ in range(count // 4 if stream else 0):
        before()
        synchronize()
        on_device.append(device_time(call))
    return {"issued": us(issued), "done": us(done), "done_p99": p99(done), "device": us(on_device)}


def commit_times(work, count, device):
    """The same of the way to the device alone, within builds: page indices are made there on either transport."""
    builder, issued, done, on_device = work.builder, [], [], []
    busy = False
    stream = None if device == "cpu" else torch.cuda.current_stream()

    def timed(inner, *given, **named):
        if busy:
            on_device.append(device_time(lambda: inner(*given, **named)))
            return
        start = time.perf_counter_ns()
        inner(*given, **named)
        issued.append(time.perf_counter_ns() - start)
        if stream:
            stream.synchronize()
        done.append(time.perf_counter_ns() - start)

    wrap_plan_and_send(builder, timed)
    step_times(work, count)
    busy = stream is not None
    step_times(work, count // 4 if busy else 0)
    return {"issued": us(issued), "done": us(done), "done_p99": p99(done), "device": us(on_device)}


def device_time(call):
    """Nanoseconds between events around ``call``; the device sleeps before, so that the host's part does not show."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)
    first.record()
    call()
    last.record()
    synchronize()
    return first.elapsed_time(last) * 1e6
