"""StepKernel: checks, arranges and fills a step with the functions of the other topics."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import COMPUTED, ENCODER_DONE, ENCODER_LENS, GIVEN_TOKENS, NO_TOKENS, OK
from attncore.kernels.numba.arrange import count_ones, mark_kinds, plan_swaps
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import cache_decode_blocks
from attncore.kernels.numba.checks import check_rows, check_shape, decodes_fit, longest_of
from attncore.kernels.numba.columns import ColumnState, check_tokens, check_tokens_ahead, fill_columns
from attncore.kernels.numba.context_parallel import Ranks, keep_local
from attncore.kernels.numba.encoders import fill_encoder
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.one_token_rows import fill_decodes, start_counting
from attncore.kernels.numba.padding import pad_step
from attncore.kernels.numba.step_arena import StepArena, drop_views
from attncore.kernels.numba.step_shape import StepShape
from attncore.kernels.numba.varlen_rows import fill_rows


@jit
def advance(state, query_lens, num_ones, num_reqs, next_step):
    """Counts a step as run, in one compiled call: a signal's handler runs before or after it."""
    for i in range(num_reqs):
        state[COMPUTED, i] += 1 if i < num_ones else query_lens[i]
        state[ENCODER_DONE, i] |= state[ENCODER_LENS, i] > 0
    next_step[0] += 1


@jit
def go_back(state, ran, num_reqs, next_step):
    """The inverse of ``advance``, for the step before ``next_step``."""
    next_step[0] -= 1
    for i in range(num_reqs):
        state[COMPUTED, i] = max(state[COMPUTED, i] - ran[0, i], 0)
        if ran[1, i]:
            state[ENCODER_DONE, i] = 0


class StepKernel:
    def __init__(
        self,
        batch: BatchState,
        eager: StepShape,
        query_lens: Any,
        swaps: Any,
        kinds: Any,
        ran: Any,
        max_model_len: int,
        max_num_tokens: int,
        max_num_encoder_tokens: int,
        decode_threshold: int,
        world: int,
        rank: int,
        interleave: int,
    ) -> None:
        self.batch, self.eager = batch, eager
        self.query_lens, self.swaps, self.kinds, self._ran = query_lens, swaps, kinds, ran
        self.depth = len(eager.arenas)
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.ranks = Ranks(world, rank, interleave)
        self.shapes: dict[int, StepShape] = {}
        self.columns: list[ColumnState] = []
        self._next_step = np.zeros(1, np.int64)
        self.last: list[StepArena | None] = [None] * self.depth

    @property
    def next_step(self) -> int:
        return int(self._next_step[0])

    def decode_step(self) -> Any | None:
        with self.batch.enter():
            self.batch.undo.append((self.take_back, self.eager, self.next_step))
            return self.decode_step_inside(self.eager)

    def add_shape(self, shape: StepShape) -> None:
        self.shapes[shape.num_reqs] = shape

    def add_column(self, column: ColumnState) -> None:
        self.columns.append(column)

    def drop_shape(self, num_reqs: int) -> None:
        self.shapes.pop(num_reqs, None)

    def padded_step(self, num_reqs: Any) -> Any | None:
        shape = self.shapes.get(num_reqs) if type(num_reqs) is int else None
        if shape is None:
            return None
        with self.batch.enter():
            self.batch.undo.append((self.take_back, shape, self.next_step))
            metadata = self.decode_step_inside(shape)
            if metadata is not None:
                shape.commit(self.next_step - 1)
            return metadata

    def decode_step_inside(self, shape: StepShape) -> Any | None:
        count = self.batch.num_rows
        if self.batch.dirty or count > shape.max_rows:
            return None
        if shape.pads and (count > shape.num_reqs or shape.query_len != 1):
            return None
        longest = decodes_fit(self.batch, shape, self.max_model_len)
        return None if longest < 0 else self._run(shape, count, count, count, longest)

    def forget_arena(self, arena: int) -> None:
        self.last[arena] = None

    def schedule_all(self, query_len: int) -> None:
        self.query_lens[: self.batch.num_rows] = query_len

    def check(self, ahead: bool = False) -> tuple[int, int, int, int]:
        return self.check_step(ahead)

    def check_step(self, ahead: bool) -> tuple[int, int, int, int]:
        batch, most = self.batch, INT32_MAX if ahead else self.max_num_tokens
        failed = check_rows(batch, self.query_lens, self.max_model_len, most, self.max_num_encoder_tokens)
        check = check_tokens_ahead if ahead else check_tokens
        for index, column in enumerate(self.columns) if failed[0] == OK else ():
            row = check(column, batch.places, batch.num_computed, self.query_lens, batch.num_rows)
            if row >= 0:
                return GIVEN_TOKENS if ahead else NO_TOKENS, row, 0, index
        return failed

    def check_shape(self, shape: StepShape) -> tuple[int, int, int]:
        batch = self.batch
        code, row, count = check_shape(
            batch.state, self.query_lens, batch.num_rows, batch.cross is not None, shape.query_len, shape.uniform,
            shape.num_reqs, shape.pad_seq_len,
        )  # fmt: skip
        return code, row, count

    def arrange(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        n, lens = self.batch.num_rows, self.query_lens
        num_decodes, num_prefills = mark_kinds(lens, n, self.decode_threshold, self.kinds)
        count = plan_swaps(self.kinds, n, num_decodes, num_prefills, self.swaps)
        moves = tuple((i, j) for i, j in self.swaps[:count].tolist())
        if moves:
            self.batch.swap(moves)
        for i, j in moves:
            lens[i], lens[j] = lens[j], lens[i]
        return moves, num_decodes, num_decodes + num_prefills

    def step(self, shape: StepShape, num_decodes: int, num_reqs: int) -> Any:
        batch, computed = self.batch, self.batch.num_computed
        num_ones = count_ones(self.query_lens, num_decodes)
        for table in batch.decoders:
            cache_decode_blocks(computed, table.state, table.table, table.block_size, num_ones)
        batch.version += 1
        return self._run(shape, num_ones, num_decodes, num_reqs, longest_of(computed, num_ones))

    def empty_step(self, shape: StepShape, max_seq_len: int) -> Any:
        metadata = self._run(shape, 0, 0, 0, 0)
        out = shape.arenas[(self.next_step - 1) % self.depth]
        out.req_ids = ()
        if max_seq_len:
            out.max_seq_len = out.max_decode_seq_len = max_seq_len
            out.max_encoder_seq_len = self.batch.max_encoder_len
            out.version = -1  # the next step's longest encoder is another
        return metadata

    def take_back(self, shape: StepShape, step: int) -> None:
        self.batch.dirty = True
        self.batch.version += 1
        if self.next_step - 1 != step:
            return
        out = shape.arenas[step % self.depth]
        shape.metadata[step % self.depth].forget_step()
        go_back(self.batch.state, self._ran[step % self.depth], out.num_actual_reqs, self._next_step)

    def _run(self, shape: StepShape, num_ones: int, num_decodes: int, num_reqs: int, longest_one: int) -> Any:
        k, batch = self.next_step % self.depth, self.batch
        out, metadata = shape.arenas[k], shape.metadata[k]
        before, last, self.last[k] = None, self.last[k], None  # until all is written
        if last is out:
            before = out.num_tokens, out.num_reqs, out.num_cross_slots
        else:
            out._forget()
        fill_decodes(out, batch, num_ones, longest_one)
        start_counting(out, num_ones)
        out.max_decode_query_len = 1
        out.max_prefill_query_len = out.max_prefill_seq_len = 0
        out.num_decode_tokens = num_ones
        if num_ones < num_reqs:
            fill_rows(out, batch, num_ones, num_decodes, num_reqs, self.query_lens)
        out.num_decodes = num_decodes
        out.num_reqs = out.num_actual_reqs = num_reqs
        out.num_actual_tokens = out.num_tokens
        out.num_prefills = num_reqs - num_decodes
        out.num_prefill_tokens = out.num_tokens - out.num_decode_tokens
        if self.ranks.world > 1:
            keep_local(out, batch, self.ranks)
        if batch.cross is not None:
            fill_encoder(out, batch, num_reqs)
        if shape.pads:
            pad_step(out, batch, shape)
        out.max_query_len = out.max_prefill_query_len
        if num_decodes or shape.pads:
            out.max_query_len = max(out.max_query_len, out.max_decode_query_len)
        out.max_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
        out.step, out.req_ids, out.changes, out.moves = self.next_step, batch.req_ids, batch.changes, ()
        if before != (out.num_tokens, out.num_reqs, out.num_cross_slots):
            drop_views(out.views)
        self.last[k] = out
        ran = self._ran[k]
        ran[0, :num_ones], ran[0, num_ones:num_reqs] = 1, self.query_lens[num_ones:num_reqs]
        ran[1, :num_reqs] = out.encoder_query_lens[:num_reqs] if batch.cross and out.num_cross_slots else 0
        advance(batch.state, self.query_lens, num_ones, num_reqs, self._next_step)
        if out.columns:
            fill_columns(
                out.columns, batch.places, batch.num_computed, self.query_lens, num_ones, num_reqs, out.num_reqs,
                out.num_tokens,
            )  # fmt: skip
        return metadata
