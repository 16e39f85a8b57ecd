"""The loop: schedule a step, build its metadata, run attention, verify, book."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.batch_arguments import ONLY_GROUP
from attncore.builder.persistent.builder import MetadataBuilder
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.replay.checks.oracle import WHOLE, Shard
from attncore.replay.checks.oracle_check import OracleCheck
from attncore.replay.results.measurements import Outcome, Steps, Verification
from attncore.replay.scheduling.cache_blocks import CacheBlocks, Tables
from attncore.replay.scheduling.clock import CostModel
from attncore.replay.scheduling.draft import DraftModel, Speculation
from attncore.replay.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncore.replay.layers.attention import AttentionLayers
    from attncore.replay.layers.model_layers import ModelLayers
    from attncore.replay.scheduling.scheduler import Step
    from attncore.replay.traces.request import Request


@dataclass(frozen=True)
class Settings:
    """How requests are served; the command line says what each means.

    ``groups`` are the KV-cache groups where several were asked for; ``block_size`` then says nothing. With
    ``world_size`` ranks, blocks hold ``block_size`` tokens on each.
    """

    num_blocks: int = 16384
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    rate: float = 1.0
    clock: CostModel = field(default_factory=CostModel)
    verify_every: int = 16
    seed: int = 0
    groups: tuple[KVCacheGroup, ...] | None = None
    speculation: Speculation | None = None
    world_size: int = 1
    interleave: int = 1

    @property
    def groups_of_rank(self) -> tuple[KVCacheGroup, ...]:
        """The groups, or the one there is, with the block size of one rank."""
        return self.groups or (KVCacheGroup(ONLY_GROUP, self.block_size),)

    @property
    def groups_of_batch(self) -> tuple[KVCacheGroup, ...]:
        """The same with the tokens that a block id stands for on all ranks, and the size of the caches."""
        return tuple(
            group._replace(block_size=group.block_size * self.world_size, num_blocks=self.num_blocks)
            for group in self.groups_of_rank
        )

    @property
    def decode_threshold(self) -> int:
        return 1 + (self.speculation.num_drafts if self.speculation else 0)


def replay(
    requests: Sequence[Request],
    settings: Settings,
    layers: AttentionLayers | ModelLayers | None = None,
    *,
    record: Callable[[Step], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serves all requests, in virtual time; with ``layers`` also their attention (or a model's), else metadata only.

    ``record`` gets every step before it is booked, ``progress`` the number of requests finished after it. Raises
    ValueError where a request can never run: before the first step, naming its row and ``num_blocks``.
    """
    requests = [replace(request, arrival=request.arrival / settings.rate) for request in requests]
    groups = settings.groups_of_rank
    scheduler = Scheduler(
        requests,
        CacheBlocks(settings.groups_of_batch, settings.num_blocks),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        draft_model=DraftModel(settings.speculation, settings.seed) if settings.speculation else None,
    )
    batches = [_batch(requests, settings) for _ in range(settings.world_size)]
    builders = [_builder(batch, rank, settings, layers) for rank, batch in enumerate(batches)]
    has_windows = any(group.sliding_window for group in groups)
    steps, verification = Steps(), Verification()
    oracle_check = output_check = None
    if layers is None:
        ranks = range(settings.world_size)
        shards = [Shard(len(ranks), rank, settings.interleave) for rank in ranks] if len(ranks) > 1 else [WHOLE]
        oracle_check = OracleCheck(
            groups, settings.verify_every, verification, threshold=settings.decode_threshold, shards=shards
        )
    else:
        output_check = layers.check(requests, settings, verification)

    now, number, max_seq_len, started = 0.0, 0, 0, perf_counter()
    while scheduler.unfinished:
        step = scheduler.schedule(now)
        if step is None:
            now = max(now, scheduler.next_arrival or now)
            continue
        for batch in batches:
            scheduled = _apply(step, batch, settings)
        start = perf_counter_ns()
        metadata = builders[0].build(scheduled)
        steps.build_ns.append(perf_counter_ns() - start)
        others = [builder.build(scheduled) for builder in builders[1:]]
        if layers is not None and output_check is not None:
            outputs, elapsed = layers.forward(step, metadata, *others)
            steps.attention_ns.append(elapsed)
            output_check(number, step, metadata, outputs)
        elif oracle_check is not None:
            oracle_check(number, step, metadata, *others)
        if record is not None:
            record(step)
        steps.requests.append(len(step.decodes) + len(step.prefills))
        steps.decodes.append(len(step.decodes))
        steps.decode_tokens.append(step.decode_tokens)
        steps.prefill_tokens.append(step.prefill_tokens)
        max_seq_len = max(max_seq_len, metadata.max_seq_len)
        scheduler.complete(step)
        if step.drafts:
            _roll_back(step, batches)
            steps.drafted += sum(draft.drafted for draft in step.drafts.values())
            steps.accepted += sum(draft.accepted for draft in step.drafts.values())
        for batch in batches:
            for finished in step.finished:
                batch.remove_request(finished.row)
        if has_windows:
            steps.passed_blocks += _pass_windows(number, scheduler, batches, verification)
        now += settings.clock.seconds(step.prefill_tokens, step.decode_tokens, step.context_tokens)
        number += 1
        if progress is not None and step.finished:
            progress(len(requests) - scheduler.unfinished)
    return Outcome(
        steps=steps,
        verification=verification,
        requests=len(requests),
        preemptions=scheduler.preemptions,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        widest_row=-(-max_seq_len // min(group.block_size for group in groups)),
        virtual_seconds=now,
        wall_seconds=perf_counter() - started,
        kernels=builders[0].kernels,
    )


def _batch(requests: Sequence[Request], settings: Settings) -> InputBatch:
    groups = settings.groups_of_batch
    shape: dict[str, Any] = {"groups": groups}
    if settings.groups is None:
        shape = {"block_size": groups[0].block_size, "num_blocks": groups[0].num_blocks}
    return InputBatch(
        max_num_reqs=min(settings.max_num_seqs, len(requests)),
        max_model_len=max(request.prompt_tokens + request.output_tokens for request in requests),
        **shape,
    )


def _builder(batch: InputBatch, rank: int, settings: Settings, layers: Any) -> MetadataBuilder:
    shared_out = None
    if settings.world_size > 1:
        block_size = settings.groups_of_rank[0].block_size
        shared_out = ContextParallel(settings.world_size, rank, block_size, settings.interleave)
    return MetadataBuilder(
        batch,
        layers.backend if layers else None,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        decode_threshold=settings.decode_threshold,
        context_parallel=shared_out,
    )


def _apply(step: Step, batch: InputBatch, settings: Settings) -> dict[int, int]:
    """Tells the batch what the scheduler decided; what ``build`` must be told, everybody else being a decode."""

    for running in step.preempted:
        # Not batch.preempt: the request may come back with a part of its prompt in the cache, or behind others.
        batch.remove_request(running.row)
    for running in step.admitted:
        batch.add_request(running.row, _as_given(running.tables, settings), num_computed_tokens=running.computed)
    if step.appended:
        batch.append_blocks_many({row: _as_given(tables, settings) for row, tables in step.appended.items()})
    scheduled = {running.row: count for running, count in step.prefills}
    if step.drafts:
        scheduled |= {row: 1 + draft.drafted for row, draft in step.drafts.items()}
    return scheduled


def _as_given(tables: Tables, settings: Settings) -> Any:
    """Blocks as the batch takes them: by name, where groups were named."""
    if settings.groups is None:
        return tables[0]
    return {group.name: blocks for group, blocks in zip(settings.groups, tables, strict=True)}


def _roll_back(step: Step, batches: Sequence[InputBatch]) -> None:
    """Takes back the drafts that were rejected."""
    rejected = {row: draft.rejected for row, draft in step.drafts.items() if draft.rejected}
    for batch in batches:
        batch.rollback_many(rejected)


def _pass_windows(number: int, scheduler: Scheduler, batches: list[InputBatch], verification: Verification) -> int:
    """The blocks that windows have passed leave; how many. What the batch gives up is compared with the scheduler's."""
    passed = scheduler.pass_windows()
    for batch in batches:
        released: dict[Any, Any] = batch.release_passed_blocks()
        if released != passed:
            row = next(row for row in (*passed, *released) if released.get(row) != passed.get(row))
            verification.fail(
                f"step {number}: the blocks of row {row} that windows have passed: {released.get(row)} found, "
                f"{passed.get(row)} expected"
            )
    return sum(len(blocks) for by_group in passed.values() for blocks in by_group.values())
