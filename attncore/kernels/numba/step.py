"""StepKernel: checks, arranges and fills a step with the functions of the other topics."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.codes import ENCODER_DONE
from attncore.kernels.numba.arrange import count_ones, mark_kinds, plan_swaps
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import cache_decode_blocks
from attncore.kernels.numba.checks import check_rows, check_shape, decodes_fit, longest_of
from attncore.kernels.numba.context_parallel import Ranks, keep_local
from attncore.kernels.numba.encoders import fill_encoder
from attncore.kernels.numba.one_token_rows import fill_decodes, start_counting
from attncore.kernels.numba.padding import pad_step
from attncore.kernels.numba.step_arena import StepArena
from attncore.kernels.numba.step_shape import StepShape
from attncore.kernels.numba.varlen_rows import fill_rows


class StepKernel:
    def __init__(
        self,
        batch: BatchState,
        eager: StepShape,
        query_lens: Any,
        swaps: Any,
        kinds: Any,
        max_model_len: int,
        max_num_tokens: int,
        max_num_encoder_tokens: int,
        decode_threshold: int,
        world: int,
        rank: int,
        interleave: int,
    ) -> None:
        self.batch, self.eager = batch, eager
        self.query_lens, self.swaps, self.kinds = query_lens, swaps, kinds
        self.depth = len(eager.arenas)
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.ranks = Ranks(world, rank, interleave)
        self.shapes: dict[int, StepShape] = {}
        self.next_step = 0
        self.last: list[StepArena | None] = [None] * self.depth

    def decode_step(self) -> Any | None:
        return None if self.batch.busy else self.decode_step_inside(self.eager)

    def add_shape(self, shape: StepShape) -> None:
        self.shapes[shape.num_reqs] = shape

    def drop_shape(self, num_reqs: int) -> None:
        del self.shapes[num_reqs]

    def padded_step(self, num_reqs: Any) -> Any | None:
        shape = self.shapes.get(num_reqs) if type(num_reqs) is int else None
        if shape is None or self.batch.busy:
            return None
        metadata = self.decode_step_inside(shape)
        if metadata is not None:
            shape.commit(self.next_step - 1)
        return metadata

    def decode_step_inside(self, shape: StepShape) -> Any | None:
        count = self.batch.num_rows
        if self.batch.dirty or count > self.max_num_tokens:
            return None
        if shape.pads and (count > shape.num_reqs or shape.query_len != 1):
            return None
        longest = decodes_fit(self.batch, shape, self.max_model_len)
        return None if longest < 0 else self._run(shape, count, count, count, longest)

    def forget_arena(self, arena: int) -> None:
        self.last[arena] = None

    def schedule_all(self, query_len: int) -> None:
        self.query_lens[: self.batch.num_rows] = query_len

    def check(self) -> tuple[int, int, int, int]:
        return check_rows(
            self.batch, self.query_lens, self.max_model_len, self.max_num_tokens, self.max_num_encoder_tokens
        )

    def check_shape(self, shape: StepShape) -> tuple[int, int, int]:
        batch = self.batch
        code, row, count = check_shape(
            batch.state, self.query_lens, batch.num_rows, batch.cross is not None, shape.query_len, shape.uniform,
            shape.num_reqs, shape.pad_seq_len,
        )  # fmt: skip
        return code, row, count

    def arrange(self) -> tuple[int, int, int]:
        n, lens = self.batch.num_rows, self.query_lens
        num_decodes, num_prefills = mark_kinds(lens, n, self.decode_threshold, self.kinds)
        count = plan_swaps(self.kinds, n, num_decodes, num_prefills, self.swaps)
        for i, j in self.swaps[:count].tolist():
            self.batch.swap(i, j)
            lens[i], lens[j] = lens[j], lens[i]
        return count, num_decodes, num_decodes + num_prefills

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

    def undo(self, shape: StepShape, num_swaps: int) -> None:
        self.next_step -= 1
        batch, out = self.batch, shape.arenas[self.next_step % self.depth]
        n = out.num_actual_reqs
        batch.num_computed[:n] = np.maximum(batch.num_computed[:n] - np.maximum(out.query_lens[:n], 0), 0)
        if batch.cross is not None:
            batch.state[ENCODER_DONE, :n][out.encoder_query_lens[:n] > 0] = 0
        batch.version += 1
        shape.metadata[self.next_step % self.depth].forget_step()
        for i, j in self.swaps[:num_swaps][::-1].tolist():
            batch.swap(i, j)

    def _run(self, shape: StepShape, num_ones: int, num_decodes: int, num_reqs: int, longest_one: int) -> Any:
        k, batch = self.next_step % self.depth, self.batch
        out, metadata = shape.arenas[k], shape.metadata[k]
        before = out.num_tokens, out.num_reqs, out.num_cross_slots
        if self.last[k] is not out:
            self.last[k] = out
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
        self.next_step += 1
        if before != (out.num_tokens, out.num_reqs, out.num_cross_slots):
            metadata.forget_views()
        return metadata
