"""StepKernel: checks, arranges and fills a step with the functions of the other topics.

A step is one compiled call, which no signal's handler and no other thread comes into: what it writes, it writes whole.
A steady step (of the rows of the arena's last one, of one token each) is nothing but that call; any other step enters
the batch, and names of requests and cached views, which are Python's, are written around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import GIVEN_TOKENS, NO_TOKENS, OK
from attncore.kernels.numba.arrange import count_ones, mark_kinds, plan_swaps
from attncore.kernels.numba.batch import BATCH_VIEW, BatchState
from attncore.kernels.numba.block_table import TABLE_VIEW, cache_decode_blocks
from attncore.kernels.numba.checks import check_rows, check_shape, decodes_fit, longest_of
from attncore.kernels.numba.columns import ColumnState, check_tokens, check_tokens_ahead, fill_columns
from attncore.kernels.numba.context_parallel import RANKS, keep_local
from attncore.kernels.numba.encoders import fill_encoder, has_encoder
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import LENGTH, Struct, Words, address_of, lengths_at, longs_at, number, struct_at
from attncore.kernels.numba.one_token_rows import fill_decodes, start_counting
from attncore.kernels.numba.padding import pad_step
from attncore.kernels.numba.step_arena import ARENA, StepArena, _forget, drop_views
from attncore.kernels.numba.step_shape import SHAPE, StepShape
from attncore.kernels.numba.varlen_rows import fill_rows

STEP_KERNEL = Struct("batch", "query_lens", "ran", "last", "ranks", "world", "depth", "max_model_len", "next_step")
"""What loops know of a StepKernel. ``last``: by arena of the ring, the address of the StepArena whose step it holds
whole; 0: none."""
KERNEL = STEP_KERNEL.type
RANKS_VIEW = RANKS.type


@jit
def ran_at(kernel, batch, k):
    """Where the tokens are noted that the rows of arena k's step ran; those of encoders, ``capacity`` further."""
    return lengths_at(kernel.ran + 2 * k * batch.capacity * LENGTH)


@jit
def note_ran(kernel, batch, out, k, num_ones, num_reqs):
    """Notes what ``go_back`` takes back."""
    query_lens, ran = lengths_at(kernel.query_lens), ran_at(kernel, batch, k)
    for i in range(num_ones, num_reqs):
        ran[i] = query_lens[i]
    for i in range(num_reqs if out.num_cross_slots else 0):
        ran[batch.capacity + i] = lengths_at(out.encoder_query_lens)[i]


@jit
def write_counts(out, num_ones, num_decodes, num_reqs):
    out.num_ones, out.num_decodes = num_ones, num_decodes
    out.num_reqs = out.num_actual_reqs = num_reqs
    out.num_actual_tokens = out.num_tokens
    out.num_prefills = num_reqs - num_decodes
    out.num_prefill_tokens = out.num_tokens - out.num_decode_tokens


@jit
def write_step(kernel, shape, batch, num_ones, num_decodes, num_reqs, longest_one):
    """Writes the next step, and counts it as run."""
    k, query_lens = kernel.next_step % kernel.depth, lengths_at(kernel.query_lens)
    out = struct_at(longs_at(shape.arenas)[k], ARENA)
    fill_decodes(out, batch, num_ones, longest_one)
    start_counting(out, num_ones)
    out.max_decode_query_len = 1
    out.max_prefill_query_len = out.max_prefill_seq_len = 0
    out.num_decode_tokens = num_ones
    if num_ones < num_reqs:
        fill_rows(out, batch, num_ones, num_decodes, num_reqs, query_lens)
    write_counts(out, num_ones, num_decodes, num_reqs)
    if kernel.world > 1:
        keep_local(out, batch, struct_at(kernel.ranks, RANKS_VIEW))
    if batch.cross:
        fill_encoder(out, batch, num_reqs)
    note_ran(kernel, batch, out, k, num_ones, num_reqs)
    if shape.pads:
        pad_step(out, batch, shape)
    out.max_query_len = out.max_prefill_query_len
    if num_decodes or shape.pads:
        out.max_query_len = max(out.max_query_len, out.max_decode_query_len)
    out.max_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
    if out.num_columns:
        fill_columns(out, batch, query_lens, num_ones, num_reqs)
    out.step, out.changes = kernel.next_step, batch.changes
    kernel.next_step += 1


@jit
def is_steady(kernel, shape, batch):
    """Whether the next step has the rows of its arena's last one: its names, views and prefixes stay as they are."""
    k, count = kernel.next_step % kernel.depth, batch.num_rows
    out = struct_at(longs_at(shape.arenas)[k], ARENA)
    if longs_at(batch.taken)[0] or longs_at(kernel.last)[k] != longs_at(shape.arenas)[k]:
        return False
    if out.named != batch.named or out.has_moves or out.num_actual_reqs != count:
        return False
    if batch.cross and not has_encoder(out, batch, count):
        return False
    return shape.pads != 0 or (out.num_reqs == count and out.num_tokens == count)


@jit
def holds_decodes(shape, batch):
    """Whether the batch's rows are in order, and a step of one token of each has the shape."""
    if batch.dirty or batch.num_rows > shape.max_rows:
        return False
    return not shape.pads or (batch.num_rows <= shape.num_reqs and shape.query_len == 1)


@entry_point("int64(int64, int64)")
def steady_step(kernel_address, shape_address):
    """Runs one token of every row: the arena of the step, -1 where it is not steady or does not fit."""
    kernel, shape = struct_at(kernel_address, KERNEL), struct_at(shape_address, SHAPE)
    batch = struct_at(kernel.batch, BATCH_VIEW)
    if not holds_decodes(shape, batch) or not is_steady(kernel, shape, batch):
        return -1
    longest, count = decodes_fit(batch, shape, kernel.max_model_len), batch.num_rows
    if longest < 0:
        return -1
    k = kernel.next_step % kernel.depth
    write_step(kernel, shape, batch, count, count, count, longest)
    return k


@entry_point("int64(int64, int64)")
def longest_decode(kernel_address, shape_address):
    """The tokens of the longest row, where one token of every row can run; else -1."""
    kernel, shape = struct_at(kernel_address, KERNEL), struct_at(shape_address, SHAPE)
    batch = struct_at(kernel.batch, BATCH_VIEW)
    return decodes_fit(batch, shape, kernel.max_model_len) if holds_decodes(shape, batch) else -1


@entry_point("int64(int64, int64, int64, int64, int64)")
def any_step(kernel_address, shape_address, num_decodes, num_reqs, known):
    """Runs arranged and checked rows: whether cached views stay right. ``known``: its arena holds its last step."""
    kernel, shape = struct_at(kernel_address, KERNEL), struct_at(shape_address, SHAPE)
    batch, query_lens = struct_at(kernel.batch, BATCH_VIEW), lengths_at(kernel.query_lens)
    out = struct_at(longs_at(shape.arenas)[kernel.next_step % kernel.depth], ARENA)
    num_ones = count_ones(query_lens, num_decodes)
    for g in range(batch.num_decoders):
        cache_decode_blocks(struct_at(longs_at(batch.decoders)[g], TABLE_VIEW), num_ones)
    num_reqs_before, num_tokens, num_cross_slots = out.num_reqs, out.num_tokens, out.num_cross_slots
    if not known:
        _forget(out)
    longest = longest_of(lengths_at(batch.num_computed), num_ones)
    write_step(kernel, shape, batch, num_ones, num_decodes, num_reqs, longest)
    same = out.num_reqs == num_reqs_before and out.num_tokens == num_tokens and out.num_cross_slots == num_cross_slots
    return 1 if known and same else 0


@entry_point("int64(int64, int64)")
def go_back(kernel_address, arena_address):
    """Takes back what ``write_step`` counted of the last step, which the arena holds."""
    kernel, out = struct_at(kernel_address, KERNEL), struct_at(arena_address, ARENA)
    batch = struct_at(kernel.batch, BATCH_VIEW)
    kernel.next_step -= 1
    ran, computed = ran_at(kernel, batch, kernel.next_step % kernel.depth), lengths_at(batch.num_computed)
    for i in range(out.num_actual_reqs):
        computed[i] = max(computed[i] - (1 if i < out.num_ones else ran[i]), 0)
        if batch.cross and out.num_cross_slots and ran[batch.capacity + i]:
            lengths_at(batch.encoder_done)[i] = 0
    return 0


class StepKernel(Words):
    next_step = number(STEP_KERNEL, "next_step")

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
        self.shapes: dict[int, StepShape] = {}
        self.columns: list[ColumnState] = []
        self.last: list[StepArena | None] = [None] * self.depth
        self._last, self._ranks = np.zeros(self.depth, np.int64), np.array([world, rank, interleave], np.int64)
        self._own(
            STEP_KERNEL, batch=batch.address, query_lens=address_of(query_lens, np.int32),
            ran=address_of(ran, np.int32), last=address_of(self._last, np.int64),
            ranks=address_of(self._ranks, np.int64), world=world, depth=self.depth, max_model_len=max_model_len,
        )  # fmt: skip
        self._steady_step = steady_step.ready()
        self._eager, self._metadata = eager.address, eager.metadata
        self._lens = address_of(query_lens, np.int32)
        for function in (longest_decode, any_step, go_back, check_rows):
            function.ready()

    def decode_step(self) -> Any | None:
        k = self._steady_step(self.address, self._eager)
        if k >= 0:
            return self._metadata[k]
        with self.batch.enter():
            self.batch.undo.append((self.take_back, self.eager, self.next_step))
            return self.decode_step_inside(self.eager)

    def add_shape(self, bucket: Any, shape: StepShape) -> None:
        self.shapes[bucket] = shape

    def add_column(self, column: ColumnState) -> None:
        self.columns.append(column)

    def drop_shape(self, bucket: Any) -> None:
        self.shapes.pop(bucket, None)

    def padded_step(self, num_reqs: Any) -> Any | None:
        shape = self.shapes.get(num_reqs) if type(num_reqs) is int else None
        if shape is None:
            return None
        if shape.device is None:
            k = self._steady_step(self.address, shape.address)
            if k >= 0:
                return shape.metadata[k]
        with self.batch.enter():
            self.batch.undo.append((self.take_back, shape, self.next_step))
            metadata = self.decode_step_inside(shape)
            if metadata is not None:
                step = self.next_step - 1
                self.batch.undo.append((shape.commit, max(step - 1, 0)))  # graphs read the last step again
                shape.commit(step)
            return metadata

    def decode_step_inside(self, shape: StepShape) -> Any | None:
        if longest_decode(self.address, shape.address) < 0:
            return None
        count = self.batch.num_rows
        self.query_lens[:count] = 1
        return self._run(shape, count, count)

    def forget_arena(self, arena: int) -> None:
        self._last[arena] = 0
        self.last[arena] = None

    def schedule_all(self, query_len: int) -> None:
        self.query_lens[: self.batch.num_rows] = query_len

    def check(self, ahead: bool = False) -> tuple[int, int, int, int]:
        return self.check_step(ahead)

    def check_step(self, ahead: bool) -> tuple[int, int, int, int]:
        batch, most = self.batch, INT32_MAX if ahead else self.max_num_tokens
        lens = self._lens
        failed = check_rows(batch.address, lens, self.max_model_len, most, self.max_num_encoder_tokens)
        check = check_tokens_ahead if ahead else check_tokens
        for index, column in enumerate(self.columns) if failed[0] == OK else ():
            row = check(column.address, batch.address, lens)
            if row >= 0:
                return GIVEN_TOKENS if ahead else NO_TOKENS, row, 0, index
        return failed  # type: ignore[no-any-return]

    def check_shape(self, shape: StepShape) -> tuple[int, int, int]:
        return check_shape(self.batch.address, self._lens, shape.address)  # type: ignore[no-any-return]

    def arrange(self, start_moving: Callable[[], None]) -> tuple[tuple[tuple[int, int], ...], int, int]:
        n, lens = self.batch.num_rows, self.query_lens
        num_decodes, num_prefills = mark_kinds(lens, n, self.decode_threshold, self.kinds)
        count = plan_swaps(self.kinds, n, num_decodes, num_prefills, self.swaps)
        moves = tuple((i, j) for i, j in self.swaps[:count].tolist())
        if moves:
            start_moving()
            self.batch.swap(moves)
        for i, j in moves:
            lens[i], lens[j] = lens[j], lens[i]
        return moves, num_decodes, num_decodes + num_prefills

    def step(self, shape: StepShape, num_decodes: int, num_reqs: int) -> Any:
        self.batch.version += 1
        return self._run(shape, num_decodes, num_reqs)

    def empty_step(self, shape: StepShape, max_seq_len: int) -> Any:
        metadata = self._run(shape, 0, 0)
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
        shape.metadata[step % self.depth].forget_step()
        go_back(self.address, shape.arenas[step % self.depth].address)

    def _run(self, shape: StepShape, num_decodes: int, num_reqs: int) -> Any:
        k, batch = self.next_step % self.depth, self.batch
        out = shape.arenas[k]
        known, self._last[k] = int(self.last[k] is out), 0
        self.last[k] = None  # until all is written
        same = any_step(self.address, shape.address, num_decodes, num_reqs, known)
        out.req_ids, out.moves = batch.req_ids, ()
        if not same:
            drop_views(out.views)
        self.last[k] = out
        out.named = batch.named
        self._last[k] = out.address
        return shape.metadata[k]
