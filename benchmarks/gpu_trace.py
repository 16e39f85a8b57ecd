"""Bytes to the device a step over a request trace, beside the documented formula.

``bytes(bucket)`` is written out here again, from docs/performance.md, so that it is not the code's own figure.
"""

import numpy as np
import torch
from builder_insides import Sent
from gpu_work import Backend, Shape, Work, captured, synchronize

from attncore import MetadataBuilder
from attncore.replay.rank_builders import apply_before, make_batch, scheduled
from attncore.replay.scheduling.kv_cache_manager import CacheBlocks
from attncore.replay.scheduling.scheduler import Scheduler
from attncore.replay.settings import Settings
from attncore.replay.traces.read_trace import read_trace

HEADER, LINE = 640, 128
A_TOKEN = (8, 8)  # slot_mapping, positions
A_REQUEST = (4, 4)  # logits_indices, and seq_lens, which the backend of these steps needs
ONE_MORE = (4,)  # query_start_loc
BUCKETS = (1, 2, 4, 8, *range(16, 257, 16))


def bytes_of_bucket(num_tokens, num_reqs):
    """Header and fields of a bucket of one KV-cache group."""
    arrays = [n * num_tokens for n in A_TOKEN] + [n * num_reqs for n in A_REQUEST]
    arrays += [n * (num_reqs + 1) for n in ONE_MORE]
    return HEADER + sum(-(-n // LINE) * LINE for n in arrays)


def over_trace(path, device, transport, *, graphs, max_requests=None):
    """Every step of the trace: bytes sent, and what the formula says; with ``graphs`` decodes run in captured sizes."""
    settings = Settings()
    requests = read_trace(path, max_requests).requests
    scheduler = Scheduler(
        requests, CacheBlocks(settings.groups_of_batch, settings.num_blocks),
        max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens,
    )  # fmt: skip
    batch = make_batch(requests, settings)
    builder = MetadataBuilder(
        batch, Backend(device), max_num_batched_tokens=settings.max_num_batched_tokens, transport=transport
    )
    buckets = [size for size in BUCKETS if size <= batch.max_num_reqs]
    models = {size: captured(builder.capture(size).record, device) for size in buckets} if graphs else {}
    synchronize()
    sent = Sent(builder)
    now, found, expected, with_moves, contexts = 0.0, [], [], [], []
    held = {}
    while scheduler.unfinished:
        step = scheduler.schedule(now)
        if step is None:
            now = max(now, scheduler.next_arrival or now)
            continue
        apply_before(step, batch, settings)
        new = blocks_given(step)
        held |= {running.row: running for running in step.admitted}
        bucket = None
        if graphs and not step.prefills:
            bucket = next(size for size in buckets if size >= len(step.decodes))
        metadata = builder.build(scheduled(step), bucket=bucket)
        if bucket:
            metadata.replay(models[bucket])
        tokens = bucket or max(256, 1 << (step.tokens - 1).bit_length())
        fixed = bytes_of_bucket(min(tokens, settings.max_num_batched_tokens), bucket or batch.max_num_reqs)
        moved = blocks_moved(metadata, held)
        found.append(sent.nbytes())
        expected.append(fixed + 8 * new)
        with_moves.append(fixed + 8 * (new + moved))
        contexts.append(step.context_tokens)
        scheduler.complete(step)
        for finished in step.finished:
            batch.remove_request(finished.row)
        now += settings.clock.seconds(step.prefill_tokens, step.decode_tokens, step.context_tokens)
    synchronize()
    about = {"transport": transport, "graphs": graphs, "steps": len(found), "surpluses": sent.surpluses}
    return about | beside_formula(found, expected, with_moves, contexts)


def blocks_given(step):
    """How many blocks the step's requests get: those that come, and those that go on."""
    new = sum(len(running.blocks) for running in step.admitted)
    return new + sum(len(blocks) for tables in step.appended.values() for blocks in tables)


def blocks_moved(metadata, held):
    """How many blocks the requests have whose rows were moved in the step."""
    return sum(
        len(held[req_id].blocks) for row in set(sum(metadata.moves, ())) for req_id in metadata.req_ids[row : row + 1]
    )


def beside_formula(found, expected, with_moves, contexts):
    """Bytes of all steps as they were found, beside the formula and the formula with the blocks of moved rows."""
    found, expected, with_moves = (np.array(one, float) for one in (found, expected, with_moves))
    return {
        "bytes_mean": found.mean(), "bytes_median": np.median(found), "bytes_p99": np.percentile(found, 99),
        "bytes_max": found.max(), "total_over_formula": found.sum() / expected.sum(),
        "total_over_formula_with_moves": found.sum() / with_moves.sum(),
        "steps_beyond_5_percent": float((abs(found / expected - 1) > 0.05).mean()),
        "steps_beyond_5_percent_with_moves": float((abs(found / with_moves - 1) > 0.05).mean()),
        "correlation_with_context": float(np.corrcoef(found, contexts)[0, 1]),
    }  # fmt: skip


def by_context(device, transport, steps=64):
    """Bytes a step of steady decodes, by batch and context."""
    rows = []
    for n in (256, 1024):
        for context in ("8k", "128k"):
            work = Work(Shape(f"decode {n}", context, n), device, transport, Backend(device), graph=True)
            sent, nbytes = Sent(work.builder), []
            for _ in range(steps):
                work.prepare()
                work.step()
                nbytes.append(sent.nbytes())
            assert len(set(nbytes)) == 1, nbytes
            formula = bytes_of_bucket(n, n) + 8 * (n // 16)
            rows.append({"shape": str(work.shape), "bytes": nbytes[0], "formula": formula})
    return rows


def copied_bytes(device, steps=20):
    """What the profiler says that copies carried, a step: (bytes, by our count). Transport ``copy`` only."""
    import json
    import tempfile
    from pathlib import Path

    from torch.profiler import ProfilerActivity, profile

    work = Work(Shape("decode 256", "8k", 256), device, "copy", Backend(device))
    sent, counted = Sent(work.builder), 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            work.prepare()
            work.step()
            counted += sent.nbytes()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    copied = sum(one["args"].get("bytes", 0) for one in events if one.get("cat") == "gpu_memcpy")
    return {"copied": copied / steps, "counted": counted / steps}
