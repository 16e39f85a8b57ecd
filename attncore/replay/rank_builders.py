"""The InputBatch and the MetadataBuilder of each context-parallel rank, of which a replay without ranks has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.persistent.builder import MetadataBuilder
from attncore.builder.persistent.input_batch import InputBatch

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.replay.scheduling.running_request import RunningRequest, Tables
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
        self.settings, self._slots = settings, _Slots(settings)
        self.batches = [make_batch(requests, settings) for _ in range(settings.world_size)]
        self.builders = [_make_builder(batch, rank, settings, backend) for rank, batch in enumerate(self.batches)]

    def apply(self, step: Step) -> dict[int, int]:
        """Tell every batch what happens before the step; what ``build`` takes for it."""
        slots = self._slots.apply(step)
        for batch in self.batches:
            apply_before(step, batch, self.settings, slots)
        return scheduled(step)

    def complete(self, step: Step) -> None:
        """Tell every batch what became of the step: drafts that were rejected, requests that finished."""
        rejected = {row: draft.rejected for row, draft in step.drafts.items() if draft.rejected}
        for batch in self.batches:
            if step.drafts:
                batch.rollback_many(rejected)
            for finished in step.finished:
                batch.remove_request(finished.row)
        self._slots.complete(step)

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


class _Slots:
    """Which slot holds the states of which request; none where the model has no states."""

    def __init__(self, settings: Settings) -> None:
        self._states = settings.states
        self._free = list(range(settings.max_num_seqs, 0, -1)) if self._states else []
        self._held: dict[int, int] = {}

    def apply(self, step: Step) -> dict[int, dict[str, list[int]]]:
        """Slots of the requests that the step admits, by row and the name of the group."""
        if self._states is None:
            return {}
        self._give_back(step.preempted)
        self._held |= {running.row: self._free.pop() for running in step.admitted}
        return {running.row: {self._states.name: [self._held[running.row]]} for running in step.admitted}

    def complete(self, step: Step) -> None:
        """The slots of the requests that it finished are free."""
        if self._states is not None:
            self._give_back(step.finished)

    def _give_back(self, requests: Sequence[RunningRequest]) -> None:
        self._free += [self._held.pop(running.row) for running in requests]


def make_batch(requests: Sequence[Request], settings: Settings) -> InputBatch:
    """A batch for the longest of the requests, with the settings' groups or its only one, and a group of states."""
    groups = settings.groups_of_batch
    shape: dict[str, Any] = {"groups": [*groups, *filter(None, [settings.states])]}
    if len(shape["groups"]) == 1 and settings.groups is None:
        shape = {"block_size": groups[0].block_size, "num_blocks": groups[0].num_blocks}
    return InputBatch(
        max_num_reqs=min(settings.max_num_seqs, len(requests)),
        max_model_len=max(request.prompt_tokens + request.output_tokens for request in requests),
        **shape,
    )


def apply_before(
    step: Step,
    batch: InputBatch,
    settings: Settings,
    slots: Mapping[int, Mapping[str, list[int]]] = MappingProxyType({}),
) -> None:
    """Tell a batch what happens before the step: preemptions, admissions, new blocks. ``slots`` are those of the states
    of requests that it admits, by row and group name."""
    for running in step.preempted:
        # Not batch.preempt: the request may come back with a part of its prompt in the cache, or behind others.
        batch.remove_request(running.row)
    for running in step.admitted:
        block_ids = _block_ids(running.tables, settings)
        if running.row in slots:
            block_ids = {**cast("dict[str, list[int]]", block_ids), **slots[running.row]}
        batch.add_request(running.row, block_ids, num_computed_tokens=running.computed)
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
    """Blocks as the batch takes them: by group name where the batch has several groups, or named ones."""
    if settings.groups is None and not settings.keeps_states:
        return tables[0]
    return {group.name: blocks for group, blocks in zip(settings.groups_of_rank, tables, strict=True)}
