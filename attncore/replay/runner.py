"""The loop: schedule a step, build its metadata, run attention, verify, complete the step."""

from __future__ import annotations

import os
from dataclasses import replace
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from attncore.process_end import end_if_forked
from attncore.replay.checks.metadata_check import MetadataCheck
from attncore.replay.checks.oracle import WHOLE, Shard
from attncore.replay.plans import timed_plans
from attncore.replay.rank_builders import Ranks
from attncore.replay.results.measurements import Outcome, Steps, Verification
from attncore.replay.scheduling.draft_model import DraftModel
from attncore.replay.scheduling.kv_cache_manager import CacheBlocks
from attncore.replay.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.layers.attention_layers import AttentionLayers
    from attncore.replay.layers.whole_model import ModelLayers
    from attncore.replay.plans import Plans
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request


def replay(
    requests: Sequence[Request],
    settings: Settings,
    layers: AttentionLayers | ModelLayers | None = None,
    *,
    record: Callable[[Step], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serve all requests, in virtual time; with ``layers`` also their attention (or a model's), else metadata only.

    ``record`` gets every step before it is completed, ``progress`` the number of requests finished after it. Raises
    ValueError where a request can never run: before the first step, naming its row and ``num_blocks``.

    Attention leaves nothing of a build in the processor's caches. Where it ran, the steps are therefore scheduled and
    built a second time without it: the same steps, because time is virtual.
    """
    requests = [replace(request, arrival=request.arrival / settings.rate) for request in requests]
    if layers is not None:
        settings = replace(settings, keeps_states=layers.keeps_states)
    with timed_plans(layers.backend if layers else None) as plans:
        run = _Run(requests, settings, layers, plans)
        started = perf_counter()
        _serve(run, record, progress)
        wall_seconds = perf_counter() - started
        again = run
        if layers is not None:
            run.ranks.close()
            again = _Run(requests, settings, layers, plans, only_builds=True)
            _serve(again)
    return run.outcome(wall_seconds, again.steps.build_ns)


def _serve(
    run: _Run, record: Callable[[Step], None] | None = None, progress: Callable[[int], None] | None = None
) -> None:
    """Run steps until all requests are served."""
    scheduler, clock = run.scheduler, run.settings.clock
    now, number, process = 0.0, 0, os.getpid()
    while scheduler.unfinished:
        step = scheduler.schedule(now)
        if step is None:
            now = max(now, scheduler.next_arrival or now)
            continue
        try:
            run.execute(number, step)
        finally:
            end_if_forked(process)
        if record is not None:
            record(step)
        run.complete(number, step)
        end = now + clock.seconds(step.prefill_tokens, step.decode_tokens, step.context_tokens)
        run.steps.starts.append(now)
        run.steps.ends.append(end)
        now = end
        number += 1
        if progress is not None and step.finished:
            progress(len(run.requests) - scheduler.unfinished)


class _Run:
    """One replay: scheduler, ranks, layers and checks, and what was counted so far.

    With ``only_builds`` steps are built for the backend of ``layers``, and neither attended nor checked.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        settings: Settings,
        layers: AttentionLayers | ModelLayers | None,
        plans: Plans,
        *,
        only_builds: bool = False,
    ) -> None:
        self.requests, self.settings, self.layers = requests, settings, layers
        self.plans, self.only_builds = plans, only_builds
        self.has_windows = settings.has_windows
        self.scheduler = Scheduler(
            requests,
            CacheBlocks(settings.groups_of_batch, settings.num_blocks, finds_prefixes=not settings.keeps_states),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            draft_model=DraftModel(settings.speculation, settings.seed) if settings.speculation else None,
        )
        self.ranks = Ranks(requests, settings, layers.backend if layers else None)
        self.steps, self.verification, self.max_seq_len = Steps(), Verification(), 0
        if only_builds:
            return
        if layers is None:
            self.metadata_check = MetadataCheck(
                settings.groups_of_rank,
                settings.verify_every,
                self.verification,
                threshold=settings.decode_threshold,
                shards=_shards(settings),
            )
        else:
            self.output_check = layers.check(requests, settings, self.verification)

    def execute(self, number: int, step: Step) -> None:
        """Build the step's metadata and run and check its attention, or check the metadata."""
        scheduled = self.ranks.apply(step)
        first, *others = self.ranks.builders
        planned, start = self.plans.nanoseconds, perf_counter_ns()
        metadata = first.build(scheduled)
        elapsed, planned = perf_counter_ns() - start, self.plans.nanoseconds - planned
        self.steps.build_ns.append(elapsed - planned)
        if self.plans.exist:
            self.steps.plan_ns.append(planned)
        of_ranks: list[StepMetadata] = [metadata, *(builder.build(scheduled) for builder in others)]
        if self.only_builds:
            return
        if self.layers is None:
            self.metadata_check(number, step, *of_ranks)
        else:
            outputs, elapsed = self.layers.forward(step, *of_ranks)
            self.steps.attention_ns.append(elapsed)
            self.output_check(number, step, metadata, outputs)
        self.max_seq_len = max(self.max_seq_len, metadata.max_seq_len)

    def complete(self, number: int, step: Step) -> None:
        """Count the step, and tell the scheduler and the ranks what became of it."""
        steps = self.steps
        steps.requests.append(len(step.decodes) + len(step.prefills))
        steps.decodes.append(len(step.decodes))
        steps.decode_tokens.append(step.decode_tokens)
        steps.prefill_tokens.append(step.prefill_tokens)
        steps.drafted += sum(draft.drafted for draft in step.drafts.values())
        steps.accepted += sum(draft.accepted for draft in step.drafts.values())
        self.scheduler.complete(step)
        self.ranks.complete(step)
        if self.has_windows:
            passed = self.scheduler.pass_windows()
            for sentence in self.ranks.release_passed_blocks(passed):
                self.verification.fail(f"step {number}: {sentence}")
            steps.passed_blocks += sum(len(blocks) for by_group in passed.values() for blocks in by_group.values())

    def outcome(self, wall_seconds: float, hot_build_ns: array[int]) -> Outcome:
        """What was counted, of a run that has ended."""
        block_size = min(group.block_size for group in self.settings.groups_of_rank)
        return Outcome(
            steps=self.steps,
            hot_build_ns=hot_build_ns,
            verification=self.verification,
            requests=len(self.requests),
            preemptions=self.scheduler.preemptions,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            widest_row=-(-self.max_seq_len // block_size),
            virtual_seconds=self.steps.ends[-1] if self.steps.ends else 0.0,
            wall_seconds=wall_seconds,
            kernels=self.ranks.builders[0].kernels,
        )


def _shards(settings: Settings) -> list[Shard]:
    world_size = settings.world_size
    return [Shard(world_size, rank, settings.interleave) for rank in range(world_size)] if world_size > 1 else [WHOLE]
