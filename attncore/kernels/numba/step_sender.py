"""StepSender: a step's header and the journal of its block tables, written to the arena; reads the receipt."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from attncore.kernels.codes import (
    HEADER_AHEAD,
    HEADER_COUNTS,
    HEADER_JOURNAL,
    HEADER_LAUNCH,
    HEADER_ROWS,
    HEADER_RUNNING,
    HEADER_TOKENS,
    JOURNAL_ENTRY_WORDS,
    RECEIPT_LAUNCHED,
    RECEIPT_STEP,
    RECEIPT_WORDS,
    launch_word,
)
from attncore.kernels.numba.block_table import TableState, write_journal
from attncore.kernels.numba.step_arena import StepArena
from attncore.kernels.numba.step_shape import StepShape


def words_at(address: int, count: int, ctype: Any) -> Any:
    """An array over ``count`` words of memory at ``address``."""
    return np.ctypeslib.as_array((ctype * count).from_address(address))


class StepSender:
    def __init__(self, arenas: Any, groups: list[TableState], entries: int, receipt: Any) -> None:
        if len(receipt) < RECEIPT_WORDS:
            raise ValueError(f"receipt: {len(receipt)} words found, {RECEIPT_WORDS} needed")
        self.arenas, self.tables, self.entries, self.receipt = arenas, groups, entries, receipt
        self.sent = self.pending = self.last = self.published = -1
        self.pending_shape: StepShape | None = None
        self.last_shape: StepShape | None = None
        self.alone, self.ahead, self.launched_before = True, False, 0

    def write(self, step: int, shape: StepShape, out: StepArena, num_rows: int) -> int:
        return self.write_journals(shape, out, step, num_rows)

    def write_journals(self, shape: StepShape, out: StepArena, step: int, num_rows: int) -> int:
        arena = int(self.arenas[step % len(self.arenas)])
        header = words_at(arena, HEADER_COUNTS + len(self.tables), ctypes.c_int64)
        entries = words_at(arena + shape.tail, JOURNAL_ENTRY_WORDS * self.entries, ctypes.c_int32)
        header[HEADER_ROWS], header[HEADER_TOKENS] = out.num_reqs, out.num_tokens
        header[HEADER_RUNNING], header[HEADER_AHEAD] = out.num_actual_reqs, self.receipt[RECEIPT_LAUNCHED]
        header[HEADER_JOURNAL] = shape.tail
        total = 0
        for g, table in enumerate(self.tables):
            count = int(write_journal(table.state, table.table, num_rows, entries[JOURNAL_ENTRY_WORDS * total :]))
            header[HEADER_COUNTS + g] = count
            total += count
        return total

    def publish(self, step: int) -> None:
        header = words_at(int(self.arenas[step % len(self.arenas)]), HEADER_COUNTS, ctypes.c_int64)
        self.published = step
        header[HEADER_LAUNCH] = launch_word(1 + step + int(header[HEADER_AHEAD]), int(header[HEADER_JOURNAL]))

    def withdraw(self, step: int) -> None:
        self.published = -1
        words_at(int(self.arenas[step % len(self.arenas)]), HEADER_COUNTS, ctypes.c_int64)[HEADER_LAUNCH] = 0

    def note_sent(self, step: int, shape: StepShape) -> None:
        self.sent = self.last = step
        self.last_shape = shape

    def seen(self, step: int) -> bool:
        return bool(self.receipt[RECEIPT_STEP] >= step)

    def launch(self, step: int, graph: Any) -> bool:
        replay, shape = getattr(graph, "replay", None), self.pending_shape
        if (
            replay is None
            or not self.alone
            or self.ahead
            or step != self.pending
            or shape is None
            or not shape.recorded
        ):
            return False
        if self.published == step:
            return False
        self.publish(step)
        replay()
        self.note_sent(step, shape)
        self.pending = -1
        return True

    def start_ahead(self) -> None:
        self.launched_before, self.ahead = int(self.receipt[RECEIPT_LAUNCHED]), True

    def launch_ahead(self, count: int) -> None:
        self.receipt[RECEIPT_LAUNCHED] = count
