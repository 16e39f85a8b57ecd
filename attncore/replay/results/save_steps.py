"""Records the batches of a replay as a batch file: JSON Lines that ``attncore build`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.json_output import json_text
from attncore.replay.results.whole_file import WholeFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.scheduling.step import Step


class StepsFile(WholeFile):
    """``with StepsFile(path, block_size) as record: record(step)``. ``line`` makes what a line holds of a step."""

    def __init__(
        self, path: str | Path, block_size: int, line: Callable[[Step, int], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(path)
        self.block_size = block_size
        self._line = line or batch_line

    def __call__(self, step: Step) -> None:
        """One line for a step, whose requests stand as before it."""
        self.write(json_text(self._line(step, self.block_size), separators=(",", ":")) + "\n")


def batch_line(step: Step, block_size: int) -> dict[str, Any]:
    """A step in the words of the batch file: prompts first, one group a request."""
    prompts = [_group(running, count, is_prompt=True) for running, count in step.prefills]
    decodes = [_group(running, 1, is_prompt=False) for running in step.decodes]
    chunked = any(running.computed for running, _ in step.prefills)
    return {"block_size": block_size, "chunked_prefill": chunked, "groups": prompts + decodes}


def _group(running: RunningRequest, query_len: int, *, is_prompt: bool) -> dict[str, Any]:
    sequence = {
        "seq_id": running.row,
        "query_len": query_len,
        "context_len": running.computed,
        "block_table": running.blocks,
    }
    return {"is_prompt": is_prompt, "sequences": [sequence]}


def persistent_line(step: Step, block_size: int, groups: Sequence[KVCacheGroup] | None = None) -> dict[str, Any]:
    """A step in the words of the batch file of ``attncore build --groups``, ``--speculative``, ``--context-parallel``.

    One sequence a request, decodes first; tables by name where there are ``groups``.
    """
    query_lens = [(running, 1 + step.draft(running).drafted) for running in step.decodes] + step.prefills
    sequences = []
    for running, query_len in query_lens:
        sequence: dict[str, Any] = {"seq_id": running.row, "query_len": query_len, "context_len": running.computed}
        if groups is None:
            sequences.append(sequence | {"block_table": running.blocks})
        else:
            tables = {group.name: blocks for group, blocks in zip(groups, running.tables, strict=True)}
            sequences.append(sequence | {"block_tables": tables})
    return {"sequences": sequences} if groups else {"block_size": block_size, "sequences": sequences}
