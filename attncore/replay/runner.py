"""The loop: schedule a step, build its metadata, run attention, verify, book."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from attncore.builder.builder import MetadataBuilder
from attncore.builder.input_batch import InputBatch
from attncore.replay.block_pool import BlockPool
from attncore.replay.clock import CostModel
from attncore.replay.dense_check import DenseCheck
from attncore.replay.measurements import Outcome, Steps, Verification
from attncore.replay.oracle_check import OracleCheck
from attncore.replay.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncore.replay.attention import AttentionLayers
    from attncore.replay.request import Request
    from attncore.replay.scheduler import Step


@dataclass(frozen=True)
class Settings:
    """How requests are served; the command line says what each means."""

    num_blocks: int = 16384
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    rate: float = 1.0
    clock: CostModel = field(default_factory=CostModel)
    verify_every: int = 16
    seed: int = 0


def replay(
    requests: Sequence[Request],
    settings: Settings,
    layers: AttentionLayers | None = None,
    *,
    record: Callable[[Step], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serves all requests, in virtual time; with ``layers`` also their attention, else metadata only.

    ``record`` gets every step before it is booked, ``progress`` the number of requests finished after it. Raises
    ValueError where a request can never run: before the first step, naming its row and ``num_blocks``.
    """
    requests = [replace(request, arrival=request.arrival / settings.rate) for request in requests]
    scheduler = Scheduler(
        requests,
        BlockPool(settings.num_blocks),
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    batch = InputBatch(
        max_num_reqs=min(settings.max_num_seqs, len(requests)),
        max_model_len=max(request.prompt_tokens + request.output_tokens for request in requests),
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
    )
    builder = MetadataBuilder(
        batch, layers.backend if layers else None, max_num_batched_tokens=settings.max_num_batched_tokens
    )
    steps, verification = Steps(), Verification()
    oracle_check = dense_check = None
    if layers is None:
        oracle_check = OracleCheck(settings.block_size, settings.verify_every, verification)
    else:
        dense_check = DenseCheck(layers, requests, settings.verify_every, settings.seed, verification)

    now, number, max_seq_len, started = 0.0, 0, 0, perf_counter()
    while scheduler.unfinished:
        step = scheduler.schedule(now)
        if step is None:
            now = max(now, scheduler.next_arrival or now)
            continue
        scheduled = _apply(step, batch)
        start = perf_counter_ns()
        metadata = builder.build(scheduled)
        steps.build_ns.append(perf_counter_ns() - start)
        if layers is not None and dense_check is not None:
            outputs, elapsed = layers.forward(step, metadata)
            steps.attention_ns.append(elapsed)
            dense_check(number, step, metadata, outputs)
        elif oracle_check is not None:
            oracle_check(number, step, metadata)
        if record is not None:
            record(step)
        steps.requests.append(len(step.decodes) + len(step.prefills))
        steps.decodes.append(len(step.decodes))
        steps.prefill_tokens.append(step.prefill_tokens)
        max_seq_len = max(max_seq_len, metadata.max_seq_len)
        scheduler.complete(step)
        for finished in step.finished:
            batch.remove_request(finished.row)
        now += settings.clock.seconds(step.prefill_tokens, len(step.decodes), step.context_tokens)
        number += 1
        if progress is not None and step.finished:
            progress(len(requests) - scheduler.unfinished)
    return Outcome(
        steps=steps,
        verification=verification,
        requests=len(requests),
        preemptions=scheduler.preemptions,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        widest_row=-(-max_seq_len // settings.block_size),
        virtual_seconds=now,
        wall_seconds=perf_counter() - started,
        kernels=builder.kernels,
    )


def _apply(step: Step, batch: InputBatch) -> dict[int, int]:
    """Tells the batch what the scheduler decided; what ``build`` must be told, everybody else being a decode."""
    for running in step.preempted:
        # Not batch.preempt: the request may come back with a part of its prompt in the cache, or behind others.
        batch.remove_request(running.row)
    for running in step.admitted:
        batch.add_request(running.row, running.blocks, num_computed_tokens=running.computed)
    if step.appended:
        batch.append_blocks_many(step.appended)
    return {running.row: count for running, count in step.prefills}
