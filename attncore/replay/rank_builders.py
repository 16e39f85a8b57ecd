"""The InputBatch and the MetadataBuilder of each context-parallel rank, of which a replay without ranks has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.builder import MetadataBuilder
from attncore.builder.persistent.input_batch import InputBatch

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.replay.scheduling.running_request import Tables
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request


class Ranks:
    """A batch and a builder for each of ``settings.world_size`` ranks, all fed alike.

    ``backend`` is what MetadataBuilder takes: a backend, one for each KV-cache group by name, or None.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        settings: Settings,
        backend: AttentionBackend | Mapping[str, AttentionBackend] | None = None,
    ) -> None:
        self.settings = settings
        self.batches = [make_batch(requests, settings) for _ in range(settings.world_size)]
        self.builders = [_make_builder(batch, rank, settings, backend) for rank, batch in enumerate(self.batches)]

    def apply(self, step: Step) -> dict[int, int]:
        """Tell every batch what happens before the step; what ``build`` takes for it."""
        for batch in self.batches:
            apply_before(step, batch, self.settings)
        return scheduled(step)

    def complete(self, step: Step) -> None:
        """Tell every batch what became of the step: drafts that were rejected, requests that finished."""
        rejected = {row: draft.rejected for row, draft in step.drafts.items() if draft.rejected}
        for batch in self.batches:
            if step.drafts:
                batch.rollback_many(rejected)
            for finished in step.finished:
                batch.remove_request(finished.row)

    def close(self) -> None:
        """Wait for the device; no step can be built afterwards."""
        for builder in self.builders:
            builder.close()

    def release_passed_blocks(self, passed: Mapping[int, Mapping[str, list[int]]]) -> list[str]:
        """Have every batch release the blocks that windows have passed; sentences where these are not ``passed``, the
        scheduler's, by row and group name."""
        sentences = []
        for batch in self.batches:
            released: dict[Any, Any] = batch.release_passed_blocks()
            if released != passed:
                row = next(row for row in (*passed, *released) if released.get(row) != passed.get(row))
                sentences.append(
                    f"the blocks of row {row} that windows have passed: {released.get(row)} found, {passed.get(row)} "
                    "expected"
                )
        return sentences


def make_batch(requests: Sequence[Request], settings: Settings) -> InputBatch:
    """A batch for the longest of the requests, with the settings' groups or its only one."""
    groups = settings.groups_of_batch
    shape: dict[str, Any] = {"groups": groups}
    if settings.groups is None:
        shape = {"block_size": groups[0].block_size, "num_blocks": groups[0].num_blocks}
    return InputBatch(
        max_num_reqs=min(settings.max_num_seqs, len(requests)),
        max_model_len=max(request.prompt_tokens + request.output_tokens for request in requests),
        **shape,
    )


def apply_before(step: Step, batch: InputBatch, settings: Settings) -> None:
    """Tell a batch what happens before the step: preemptions, admissions, new blocks."""
    for running in step.preempted:
        # Not batch.preempt: the request may come back with a part of its prompt in the cache, or behind others.
        batch.remove_request(running.row)
    for running in step.admitted:
        batch.add_request(running.row, _block_ids(running.tables, settings), num_computed_tokens=running.computed)
    if step.appended:
        batch.append_blocks_many({row: _block_ids(tables, settings) for row, tables in step.appended.items()})


def scheduled(step: Step) -> dict[int, int]:
    """What ``build`` takes: the tokens of prompts and of decodes with drafts; all other requests decode one token."""
    tokens = {running.row: count for running, count in step.prefills}
    if step.drafts:
        tokens |= {row: 1 + draft.drafted for row, draft in step.drafts.items()}
    return tokens


def _make_builder(
    batch: InputBatch, rank: int, settings: Settings, backend: AttentionBackend | Mapping[str, AttentionBackend] | None
) -> MetadataBuilder:
    context_parallel = None
    if settings.world_size > 1:
        block_size = settings.groups_of_rank[0].block_size
        context_parallel = ContextParallel(settings.world_size, rank, block_size, settings.interleave)
    return MetadataBuilder(
        batch,
        backend,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        decode_threshold=settings.decode_threshold,
        context_parallel=context_parallel,
    )


def _block_ids(tables: Tables, settings: Settings) -> list[int] | dict[str, list[int]]:
    """Blocks as the batch takes them: by group name where groups were named."""
    if settings.groups is None:
        return tables[0]
    return {group.name: blocks for group, blocks in zip(settings.groups, tables, strict=True)}
