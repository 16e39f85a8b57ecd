"""The twin of ``attncore._slots`` in numba: the same classes and functions, for a platform without a C compiler.

Loops are numba functions over NumPy arrays (compiled at first use, kept in numba's cache); what touches Python objects
is plain Python. See _slots.pyi for the types and _slots.pyx for what each does.
"""

from __future__ import annotations

import collections.abc
import ctypes
from array import array as array_of_ints
from typing import Any

import numpy as np
from numba import njit

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import (
    CONTEXT_WITHOUT_CHUNKS,
    ENCODER_NOT_CAPTURED,
    HIT_ON_DECODE,
    HIT_WITH_WINDOW,
    NULL_BLOCK,
    OK,
    QUERY_NOT_CAPTURED,
    QUERY_TOO_LONG,
    TOO_FEW_BLOCKS,
    TOO_LONG,
    TOO_MANY_ENCODER_TOKENS,
    TOO_MANY_ROWS,
    TOO_MANY_SEQ_TOKENS,
    TOO_MANY_TOKENS,
)

IMPLEMENTATION = "numba"
READS_INTS = "NumPy"

# Rows of a batch's state, and of a group's.
COMPUTED, ENCODER, ENCODED = range(3)
BLOCKS, COLUMN, BLOCK, SYNCED = range(4)

_jit = njit(cache=True, nogil=False, boundscheck=False)


# ---- loops -----------------------------------------------------------------------------------------------------------


@_jit
def _fill_slots(slots, at, ids, start, stop, block_size):  # type: ignore[no-untyped-def]
    for token in range(start, stop):
        slots[at + token - start] = np.int64(ids[token // block_size]) * block_size + token % block_size


@_jit
def _fill_run(positions, rows, at, row, start, count):  # type: ignore[no-untyped-def]
    for k in range(count):
        positions[at + k] = start + k
        rows[at + k] = row


@_jit
def _check_lengths(computed, num_rows, query_lens, max_model_len):  # type: ignore[no-untyped-def]
    for i in range(num_rows):
        if query_lens[i] > max_model_len - computed[i]:
            return i
    return num_rows


@_jit
def _check_blocks(state, table, block_size, null_ids, num_rows, starts, lens):  # type: ignore[no-untyped-def]
    """The first row of which tokens starts..starts + lens have no block of their own: (code, row, token)."""
    for i in range(num_rows):
        if lens[i] == 0:
            continue
        start, held = starts[i], state[0, i]
        last = (start + lens[i] - 1) // block_size
        if last >= held:
            return TOO_FEW_BLOCKS, i, max(held * block_size, start)
        column = start // block_size
        if column == state[1, i]:
            column += 1
        while column <= last:
            if table[i, column] < null_ids:
                return NULL_BLOCK, i, max(column * block_size, start)
            column += 1
    return OK, num_rows, 0


@_jit
def _fill_shared(  # type: ignore[no-untyped-def]
    computed, num_decodes, num_reqs, query_lens,
    positions, token_rows, seq_lens, context_lens, out_query_lens, logits_indices, query_start_loc, seq_start_loc,
    prefill_query_start_loc, prefill_seq_start_loc,
):  # fmt: skip
    token, seq_start, decode_tokens, decode_seqs = 0, 0, 0, 0
    longest = np.zeros(4, np.int64)  # query and sequence of decodes, of prefills
    query_start_loc[0] = seq_start_loc[0] = 0
    for i in range(num_reqs):
        query_len = query_lens[i]
        seq_len = computed[i] + query_len
        _fill_run(positions, token_rows, token, i, computed[i], query_len)
        token += query_len
        seq_start += seq_len
        seq_lens[i], context_lens[i], out_query_lens[i] = seq_len, computed[i], query_len
        logits_indices[i] = token - 1
        query_start_loc[i + 1], seq_start_loc[i + 1] = token, seq_start
        part = 0 if i < num_decodes else 2
        longest[part] = max(longest[part], query_len)
        longest[part + 1] = max(longest[part + 1], seq_len)
        if i < num_decodes:
            decode_tokens, decode_seqs = token, seq_start
    prefill_query_start_loc[0] = prefill_seq_start_loc[0] = 0
    for i in range(num_decodes, num_reqs):
        prefill_query_start_loc[i - num_decodes + 1] = query_start_loc[i + 1] - decode_tokens
        prefill_seq_start_loc[i - num_decodes + 1] = seq_start_loc[i + 1] - decode_seqs
    return token, decode_tokens, longest


@_jit
def _fill_group(  # type: ignore[no-untyped-def]
    state, table, block_size, num_reqs, starts, lens, keeps, caches, slot_mapping, indptr, last_page_len
):  # fmt: skip
    """One group's slots and pages: of tokens starts..starts + lens of each row, which holds ``keeps`` in all."""
    token, pages = 0, 0
    indptr[0] = 0
    for i in range(num_reqs):
        _fill_slots(slot_mapping, token, table[i], starts[i], starts[i] + lens[i], block_size)
        token += lens[i]
        last_page_len[i] = 0
        if keeps[i]:
            last = (keeps[i] - 1) // block_size
            if caches:
                state[1, i], state[2, i] = last, table[i, last]
            last_page_len[i] = (keeps[i] - 1) % block_size + 1
            pages += last + 1
        indptr[i + 1] = pages
    return pages


@_jit
def _swap_blocks(state, table, i, j):  # type: ignore[no-untyped-def]
    for k in range(max(state[0, i], state[0, j])):
        table[i, k], table[j, k] = table[j, k], table[i, k]
    for k in range(3):
        state[k, i], state[k, j] = state[k, j], state[k, i]
    state[3, i] = state[3, j] = 0


@_jit
def _plan_swaps(kinds, n, first, second, swaps):  # type: ignore[no-untyped-def]
    bounds = np.array([0, first, first + second, n])
    count = 0
    for a in range(2):
        for b in range(a + 1, 3):
            j = bounds[b]
            for i in range(bounds[a], bounds[a + 1]):
                if kinds[i] != b:
                    continue
                while j < bounds[b + 1] and kinds[j] != a:
                    j += 1
                if j == bounds[b + 1]:
                    break
                count = _exchange(kinds, i, j, swaps, count)
    j = k = -1
    for i in range(bounds[1]):
        b = kinds[i]
        if b == 0:
            continue
        c = 3 - b
        j = bounds[b] if j < 0 else j
        while kinds[j] != c:
            j += 1
        k = bounds[c] if k < 0 else k
        while kinds[k] != 0:
            k += 1
        count = _exchange(kinds, i, j, swaps, count)
        count = _exchange(kinds, i, k, swaps, count)
    return count


@_jit
def _exchange(kinds, i, j, swaps, count):  # type: ignore[no-untyped-def]
    kinds[i], kinds[j] = kinds[j], kinds[i]
    swaps[count, 0], swaps[count, 1] = i, j
    return count + 1


@_jit
def _needs_block(computed, num_blocks, num_rows, block_size, width, out):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(num_rows):
        column = computed[i] // block_size
        if num_blocks[i] <= column < width:
            out[count] = i
            count += 1
    return count


@_jit
def _fill_slot_mapping(table, context_lens, query_lens, block_size, out):  # type: ignore[no-untyped-def]
    token = 0
    for i in range(len(query_lens)):
        _fill_slots(out, token, table[i], context_lens[i], context_lens[i] + query_lens[i], block_size)
        token += query_lens[i]


@_jit
def _fill_positions(context_lens, query_lens, positions, token_rows):  # type: ignore[no-untyped-def]
    token = 0
    for i in range(len(query_lens)):
        _fill_run(positions, token_rows, token, i, context_lens[i], query_lens[i])
        token += query_lens[i]


# Columns of an entry of the list door.
FIRST, NUM_IDS, QUERY, CONTEXT, KERNEL, ROW_START, ROW_COUNT, IS_PROMPT, HIT = range(9)


@_jit
def _measure(entries, n, block_size, window, chunked_prefill, hit_anywhere, multi_token_decode):  # type: ignore[no-untyped-def]
    any_hit = hit_anywhere and np.any(entries[:n, 8] != 0)
    sums = np.zeros(11, np.int64)  # as GroupReader.measure answers them, behind code, row and token
    sums[9] = 1
    for i in range(n):
        num_ids, query_len, context_len, is_prompt, hit = (
            entries[i, 1], entries[i, 2], entries[i, 3], entries[i, 7] != 0, entries[i, 8] != 0
        )  # fmt: skip
        seq_len = context_len + query_len
        kernel_len = seq_len
        needed = (seq_len - 1) // block_size + 1
        started = seq_len % block_size
        window_blocks = (window - 1) // block_size + 1
        if is_prompt:
            if hit and window:
                return HIT_WITH_WINDOW, i, 0, sums
            if context_len and not chunked_prefill and not hit:
                return CONTEXT_WITHOUT_CHUNKS, i, 0, sums
            sums[2] += 1
            sums[3] += query_len
            sums[7] = max(sums[7], seq_len)
        else:
            if hit:
                return HIT_ON_DECODE, i, 0, sums
            if query_len > 1 and not multi_token_decode:
                return QUERY_TOO_LONG, i, 0, sums
            if window:
                kernel_len = min(seq_len, window_blocks * block_size + started)
            sums[8] = max(sums[8], kernel_len)
            sums[9] = max(sums[9], query_len)
        start, count = 0, 0
        if num_ids >= 0:
            if needed > num_ids:
                token = max(context_len, num_ids * block_size)
                if is_prompt and window:
                    token = max(token, query_len - window)
                return TOO_FEW_BLOCKS, i, token, sums
            sums[5] += needed
            if not is_prompt and window:
                count = min(window_blocks + (started != 0), needed)
                start = needed - count
            elif not is_prompt or chunked_prefill or hit or any_hit:
                count = num_ids
        entries[i, 4], entries[i, 5], entries[i, 6] = kernel_len, start, count
        sums[0] += query_len
        sums[1] += kernel_len
        sums[4] = max(sums[4], count)
        sums[6] = max(sums[6], query_len)
        sums[10] = max(sums[10], kernel_len)
    if sums[0] > INT32_MAX or sums[1] > INT32_MAX or sums[5] > INT32_MAX:
        return TOO_MANY_SEQ_TOKENS, 0, 0, sums
    return OK, 0, 0, sums


@_jit
def _fill_groups(  # type: ignore[no-untyped-def]
    entries, ids, n, block_size, window, pad,
    slot_mapping, positions, token_rows, seq_lens, context_lens, query_lens, query_start_loc, seq_start_loc, logits,
):  # fmt: skip
    token, seq_start = 0, 0
    query_start_loc[0] = seq_start_loc[0] = 0
    for i in range(n):
        first, num_ids, query_len, context_len = entries[i, 0], entries[i, 1], entries[i, 2], entries[i, 3]
        masked = query_len if num_ids < 0 else 0
        if num_ids >= 0 and entries[i, 7] and window:
            masked = min(max(query_len - window - context_len, 0), query_len)
        slot_mapping[token : token + masked] = -1
        _fill_slots(
            slot_mapping, token + masked, ids[first:], context_len + masked, context_len + query_len, block_size
        )
        _fill_run(positions, token_rows, token, i, context_len, query_len)
        token += query_len
        seq_start += entries[i, 4]
        seq_lens[i], context_lens[i], query_lens[i] = entries[i, 4], context_len, query_len
        query_start_loc[i + 1], seq_start_loc[i + 1], logits[i] = token, seq_start, token - 1
    for i in range(pad):
        slot_mapping[token + i], positions[token + i], token_rows[token + i] = -1, 0, n + i
        seq_lens[n + i] = 1
        seq_start_loc[n + i + 1] = seq_start + i + 1


@_jit
def _fill_table(entries, ids, n, table):  # type: ignore[no-untyped-def]
    table[:] = 0
    for i in range(min(n, len(table))):
        start = entries[i, 0] + entries[i, 5]
        for k in range(min(entries[i, 6], table.shape[1])):
            table[i, k] = ids[start + k]


@_jit
def _fill_pages(entries, ids, n, block_size, indptr, indices, last_page_len):  # type: ignore[no-untyped-def]
    pages = 0
    indptr[0] = 0
    for i in range(len(last_page_len)):
        last_page_len[i] = 0
        if i < n and entries[i, 1] >= 0:
            seq_len = entries[i, 2] + entries[i, 3]
            for k in range((seq_len - 1) // block_size + 1):
                indices[pages + k] = ids[entries[i, 0] + k]
            pages += (seq_len - 1) // block_size + 1
            last_page_len[i] = (seq_len - 1) % block_size + 1
        indptr[i + 1] = pages


# ---- reading Python objects ------------------------------------------------------------------------------------------


def _read_int(value: Any) -> int | None:
    """A Python int of 64 bits (no bool), None otherwise."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        number = int(value.__index__())
    except Exception:  # the caller's own code; whatever it raises, this is no int
        return None
    return number if -(2**63) <= number < 2**63 else None


def _read_ids(ids: Any, limit: int) -> Any:
    """Block ids 0 <= id < limit as an int32 array; None where one is bad."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype in (np.int32, np.int64):
        array = ids
    elif type(ids) is list and set(map(type, ids)) == {int}:
        try:
            array = np.array(array_of_ints("q", ids))
        except OverflowError:
            return None
    else:
        if not hasattr(ids, "__len__"):
            return None
        try:
            items = [_read_int(item) for item in list(ids)]
        except (TypeError, MemoryError, OverflowError):
            return None
        if None in items:
            return None
        array = np.array(items, np.int64)
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= limit):
        return None
    return array.astype(np.int32)


# ---- the persistent door ---------------------------------------------------------------------------------------------


class TableState:
    num_computed: Any  # the batch's

    def __init__(
        self, state: Any, stale: Any, table: Any, block_size: int, num_blocks: int, kernel_blocks: int
    ) -> None:
        self.state, self.table, self.block_size, self.num_blocks = state, table, block_size, num_blocks
        self.capacity, self.width = table.shape
        self.kernel_blocks = kernel_blocks

    def start(self, row: int) -> None:
        self.state[:SYNCED, row] = 0, -1, 0

    def append(self, row: int, ids: Any) -> int:
        array, each = _read_ids(ids, self.num_blocks), self.kernel_blocks
        held = int(self.state[BLOCKS, row])
        if array is None or len(array) * each > self.width - held:
            return -1
        columns = (array[:, np.newaxis] * np.int32(each) + np.arange(each, dtype=np.int32)).ravel()
        self.table[row, held : held + len(columns)] = columns
        self.state[BLOCKS, row] = held + len(columns)
        return len(array)

    def truncate(self, row: int, num_blocks: int) -> None:
        self.table[row, num_blocks : self.state[BLOCKS, row]] = 0
        self.state[BLOCKS, row] = num_blocks
        self.state[SYNCED, row] = min(self.state[SYNCED, row], num_blocks)
        if self.state[COLUMN, row] >= num_blocks:
            self.state[COLUMN, row] = -1

    def replace(self, row: int, column: int, block: int) -> None:
        self.table[row, column] = block
        self.state[SYNCED, row] = min(self.state[SYNCED, row], column)
        if self.state[COLUMN, row] == column:
            self.state[COLUMN, row] = -1

    def needs_block(self, num_rows: int, out: Any) -> int:
        return int(_needs_block(self.num_computed, self.state[BLOCKS], num_rows, self.block_size, self.width, out))

    def pass_windows(self, num_rows: int, window: int, num_rollback: int) -> list[tuple[int, list[int]]]:
        computed = np.maximum(self.num_computed[:num_rows].astype(np.int64) - num_rollback, 0)
        columns = np.maximum(computed - window + 1, 0) // self.block_size
        columns = np.minimum(columns, self.state[BLOCKS, :num_rows]) // self.kernel_blocks - 1
        rows = np.flatnonzero(columns >= 0)
        rows = rows[self.table[rows, columns[rows] * self.kernel_blocks] >= self.kernel_blocks]
        return [(row, self._pass(row, int(columns[row]) * self.kernel_blocks)) for row in rows.tolist()]

    def _pass(self, row: int, column: int) -> list[int]:
        each, ids, passed = self.kernel_blocks, self.table[row], []
        while column >= 0 and ids[column] >= each:
            passed.append(int(ids[column]) // each)
            for extra in range(each):
                self.replace(row, column + extra, extra)
            column -= each
        return passed[::-1]

    def journal(self, num_rows: int, entries: Any) -> int:
        count, pairs = 0, entries[: len(entries) // 2 * 2].reshape(-1, 2)
        for row in range(num_rows):
            start, held = int(self.state[SYNCED, row]), int(self.state[BLOCKS, row])
            stop = min(held, start + len(pairs) - count)
            if stop > start:
                new = pairs[count : count + stop - start]
                new[:, 0] = np.arange(row * self.width + start, row * self.width + stop)
                new[:, 1] = self.table[row, start:stop]
                count += stop - start
                self.state[SYNCED, row] = stop
        return count

    def forget_synced(self) -> None:
        self.state[SYNCED] = 0


class BatchState:
    def __init__(self, state: Any, decoders: list[TableState], cross: TableState | None) -> None:
        self.state, self.decoders, self.cross = state, decoders, cross
        for group in decoders:
            group.num_computed = state[COMPUTED]
        if cross is not None:
            cross.num_computed = state[ENCODER]
        self.num_rows = 0
        self.dirty = True
        self.changes = self.max_encoder_len = 0
        self.req_ids: tuple[Any, ...] = ()
        self.busy = False

    def enter(self) -> bool:
        busy, self.busy = self.busy, True
        return not busy

    def leave(self) -> None:
        self.busy = False

    def start(self, row: int, num_computed: int, encoder_len: int, encoder_done: bool) -> None:
        self.state[:, row] = num_computed, encoder_len, encoder_done

    def set_computed(self, row: int, num_computed: int) -> None:
        self.state[COMPUTED, row] = num_computed

    def swap(self, i: int, j: int) -> None:
        for group in (*self.decoders, *([self.cross] if self.cross else [])):
            _swap_blocks(group.state, group.table, i, j)
        self.state[:, [i, j]] = self.state[:, [j, i]]


class StepArena:
    # The order in which the loops take an arena's fields.
    SHARED = (
        "positions", "token_to_req_indices", "seq_lens", "context_lens", "query_lens", "logits_indices",
        "query_start_loc", "seq_start_loc", "prefill_query_start_loc", "prefill_seq_start_loc",
    )  # fmt: skip
    GROUP = ("slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len")

    def __init__(self, fields: dict[str, Any], groups: list[dict[str, Any]], has_cross: bool) -> None:
        self.fields = fields
        self.shared = tuple(fields[name] for name in self.SHARED)
        self.groups = [tuple(group[name] for name in self.GROUP) for group in groups]
        self.step = -1
        self.num_reqs = self.num_tokens = self.num_actual_reqs = self.num_actual_tokens = 0
        self.num_decodes = self.num_decode_tokens = self.num_prefills = self.num_prefill_tokens = 0
        self.max_query_len = self.max_seq_len = self.max_prefill_seq_len = self.max_decode_seq_len = 0
        self.max_decode_query_len = 1
        self.num_encoder_tokens = self.max_encoder_seq_len = self.num_cross_slots = self.changes = 0
        self.req_ids: tuple[Any, ...] = ()
        self.moves: tuple[tuple[int, int], ...] = ()


class StepShape:
    def __init__(
        self, arenas: list[StepArena], metadata: list[Any], pads: bool = False, num_reqs: int = 0, query_len: int = 0,
        pad_seq_len: int = 0, uniform: bool = True, sources: list[Any] | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        self.arenas, self.metadata = arenas, metadata
        self.sources, self.device = sources or [], device
        self.size: Any = None
        self.replay: Any = None
        self.recorded, self.tail = False, 0
        self.pads, self.num_reqs, self.num_tokens = pads, num_reqs, num_reqs * query_len
        self.query_len, self.pad_seq_len, self.uniform = query_len, pad_seq_len, uniform

    def commit(self, step: int) -> None:
        if self.device is not None:
            self.device[:] = self.sources[step % len(self.sources)]


class StepSender:
    def __init__(self, arenas: Any, groups: list[TableState], entries: int, receipt: Any) -> None:
        self.arenas, self.groups, self.entries, self.receipt = arenas, groups, entries, receipt

    def _words(self, step: int, offset: int, count: int, kind: Any) -> Any:
        address = int(self.arenas[step % len(self.arenas)]) + offset
        return np.ctypeslib.as_array((kind * count).from_address(address))

    def write(self, step: int, bucket: StepShape, out: StepArena, num_rows: int) -> int:
        header = self._words(step, 0, 3 + len(self.groups), ctypes.c_int64)
        entries = self._words(step, bucket.tail, 2 * self.entries, ctypes.c_int32)
        header[1:3] = out.num_reqs, out.num_tokens
        total = 0
        for g, group in enumerate(self.groups):
            header[3 + g] = group.journal(num_rows, entries[2 * total :])
            total += int(header[3 + g])
        return total

    def publish(self, step: int) -> None:
        self._words(step, 0, 1, ctypes.c_int64)[0] = step

    def seen(self, step: int) -> bool:
        return bool(self.receipt[0] >= step)


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
        self.world, self.rank, self.interleave = world, rank, interleave
        self.buckets: dict[int, StepShape] = {}
        self.next_step = 0

    def decode_step(self) -> Any | None:
        return None if self.batch.busy else self.decode_step_inside(self.eager)

    def add_bucket(self, bucket: StepShape) -> None:
        self.buckets[bucket.num_reqs] = bucket

    def drop_bucket(self, size: int) -> None:
        del self.buckets[size]

    def padded_step(self, size: Any) -> Any | None:
        bucket = self.buckets.get(size) if type(size) is int else None
        if bucket is None or self.batch.busy:
            return None
        metadata = self.decode_step_inside(bucket)
        if metadata is not None:
            bucket.commit(self.next_step - 1)
        return metadata

    def decode_step_inside(self, bucket: StepShape) -> Any | None:
        batch = self.batch
        if batch.dirty or (bucket.pads and (batch.num_rows > bucket.num_reqs or bucket.query_len != 1)):
            return None
        self.schedule_all(1)
        return self._run(bucket, batch.num_rows, batch.num_rows) if self.check()[0] == OK else None

    def forget_arena(self, arena: int) -> None:
        pass  # every step writes every field

    def schedule_all(self, query_len: int) -> None:
        self.query_lens[: self.batch.num_rows] = query_len

    def check(self) -> tuple[int, int, int, int]:
        batch, n = self.batch, self.batch.num_rows
        computed, query_lens = batch.state[COMPUTED], self.query_lens
        too_long = int(_check_lengths(computed, n, query_lens, self.max_model_len))
        found = [(too_long, -1, TOO_LONG, 0)] if too_long < n else []
        for g, group in enumerate(batch.decoders):
            found += self._first_failure(group, too_long, g, computed, query_lens)
        encoders = np.where(query_lens[:n] > 0, batch.state[ENCODER, :n], 0).astype(np.int64)
        fresh = np.where(batch.state[ENCODED, :n] != 0, 0, encoders).astype(np.int32)
        if batch.cross is not None:
            found += self._first_failure(batch.cross, too_long, len(batch.decoders), np.zeros_like(fresh), fresh)
        if found:
            row, group_index, code, token = min(found)
            return code, row, token, max(group_index, 0)
        num_tokens = int(query_lens[:n].sum(dtype=np.int64))
        running = computed[:n].astype(np.int64)[query_lens[:n] > 0]
        if num_tokens > self.max_num_tokens:
            return TOO_MANY_TOKENS, 0, 0, 0
        if int(running.sum()) + num_tokens > INT32_MAX or int(encoders.sum()) > INT32_MAX:
            return TOO_MANY_SEQ_TOKENS, 0, 0, 0
        num_encoder_tokens = int(fresh.sum(dtype=np.int64))
        if num_encoder_tokens > self.max_num_encoder_tokens:
            return TOO_MANY_ENCODER_TOKENS, 0, min(num_encoder_tokens, INT32_MAX), 0
        return OK, 0, 0, 0

    def _first_failure(
        self, group: TableState, num_rows: int, index: int, starts: Any, lens: Any
    ) -> list[tuple[int, int, int, int]]:
        code, row, token = map(
            int, _check_blocks(group.state, group.table, group.block_size, group.kernel_blocks, num_rows, starts, lens)
        )
        return [] if code == OK else [(row, index, code, token)]

    def check_bucket(self, bucket: StepShape) -> tuple[int, int, int]:
        batch, count = self.batch, 0
        for i in range(batch.num_rows):
            query_len = int(self.query_lens[i])
            if query_len == 0:
                continue
            count += 1
            if query_len > bucket.query_len or (bucket.uniform and query_len != bucket.query_len):
                return QUERY_NOT_CAPTURED, i, 0
            if batch.cross is not None and batch.state[ENCODER, i] and not batch.state[ENCODED, i]:
                return ENCODER_NOT_CAPTURED, i, 0
        return (OK if count <= bucket.num_reqs else TOO_MANY_ROWS), 0, count

    def arrange(self) -> tuple[int, int, int]:
        n = self.batch.num_rows
        lens, kinds = self.query_lens[:n], self.kinds
        kinds[:n] = np.where(lens == 0, 2, np.where(lens <= self.decode_threshold, 0, 1))
        num_decodes, num_prefills = int((kinds[:n] == 0).sum()), int((kinds[:n] == 1).sum())
        count = int(_plan_swaps(kinds, n, num_decodes, num_prefills, self.swaps))
        for i, j in self.swaps[:count].tolist():
            self.batch.swap(i, j)
            lens[[i, j]] = lens[[j, i]]
        return count, num_decodes, num_decodes + num_prefills

    def step(self, bucket: StepShape, num_decodes: int, num_reqs: int) -> Any:
        return self._run(bucket, num_decodes, num_reqs)

    def empty_step(self, bucket: StepShape, max_seq_len: int) -> Any:
        metadata = self._run(bucket, 0, 0)
        out = bucket.arenas[(self.next_step - 1) % self.depth]
        out.req_ids = ()
        if max_seq_len:
            out.max_seq_len = out.max_decode_seq_len = max_seq_len
            out.max_encoder_seq_len = self.batch.max_encoder_len
        return metadata

    def undo(self, bucket: StepShape, num_swaps: int) -> None:
        self.next_step -= 1
        batch, out = self.batch, bucket.arenas[self.next_step % self.depth]
        n = out.num_actual_reqs
        batch.state[COMPUTED, :n] -= out.fields["query_lens"][:n]
        if batch.cross is not None:
            batch.state[ENCODED, :n][out.fields["encoder_query_lens"][:n] > 0] = 0
        bucket.metadata[self.next_step % self.depth].forget_step()
        for i, j in self.swaps[:num_swaps][::-1].tolist():
            batch.swap(i, j)

    def _run(self, bucket: StepShape, num_decodes: int, num_reqs: int) -> Any:
        k = self.next_step % self.depth
        batch, out, metadata = self.batch, bucket.arenas[k], bucket.metadata[k]
        size = out.num_tokens, out.num_reqs, out.num_cross_slots
        computed, lens = batch.state[COMPUTED], self.query_lens
        num_tokens, decode_tokens, longest = _fill_shared(computed, num_decodes, num_reqs, lens, *out.shared)
        seq_lens = out.fields["seq_lens"]
        for group, arrays in zip(batch.decoders, out.groups, strict=False):
            _fill_group(group.state, group.table, group.block_size, num_reqs, computed, lens, seq_lens, True, *arrays)
        computed[:num_reqs] += lens[:num_reqs]
        out.num_decodes, out.num_prefills = num_decodes, num_reqs - num_decodes
        out.num_reqs = out.num_actual_reqs = num_reqs
        out.num_tokens = out.num_actual_tokens = int(num_tokens)
        out.num_decode_tokens, out.num_prefill_tokens = int(decode_tokens), int(num_tokens - decode_tokens)
        decode_query, out.max_decode_seq_len, prefill_query, out.max_prefill_seq_len = map(int, longest)
        out.max_query_len, out.max_decode_query_len = max(decode_query, prefill_query), max(decode_query, 1)
        if self.world > 1:
            self._keep_local(out)
        if batch.cross is not None:
            self._fill_encoder(out, batch.cross)
        if bucket.pads:
            self._pad(out, bucket)
        out.max_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
        out.step, out.req_ids, out.moves, out.changes = self.next_step, batch.req_ids, (), batch.changes
        self.next_step += 1
        if size != (out.num_tokens, out.num_reqs, out.num_cross_slots):
            metadata.forget_views()
        return metadata

    def _fill_encoder(self, out: StepArena, cross: TableState) -> None:
        n, fields = out.num_reqs, out.fields
        state = self.batch.state
        lens = state[ENCODER, :n]
        fields["encoder_seq_lens"][:n] = lens
        fields["encoder_query_lens"][:n] = np.where(state[ENCODED, :n] != 0, 0, lens)
        for name in ("encoder_seq", "encoder_query"):
            fields[f"{name}_start_loc"][0] = 0
            np.cumsum(fields[f"{name}_lens"][:n], out=fields[f"{name}_start_loc"][1 : n + 1])
        fresh = fields["encoder_query_lens"]
        _fill_group(
            cross.state, cross.table, cross.block_size, n, np.zeros(n, np.int32), fresh, lens, False, *out.groups[-1]
        )
        state[ENCODED, :n] |= fresh[:n] > 0
        out.num_encoder_tokens = int(lens.sum())
        out.num_cross_slots = int(fresh[:n].sum())
        out.max_encoder_seq_len = int(lens.max(initial=0))

    def _local_lens(self, lens: Any) -> Any:
        turns, rest = np.divmod(lens.astype(np.int64), self.world * self.interleave)
        return turns * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)

    def _keep_local(self, out: StepArena) -> None:
        n, num_tokens, fields = out.num_reqs, out.num_tokens, out.fields
        for name in ("context_lens", "seq_lens"):
            fields[name][:n] = self._local_lens(fields[name][:n])
        seq_lens, start_loc = fields["seq_lens"][:n], fields["seq_start_loc"]
        np.cumsum(seq_lens, out=start_loc[1 : n + 1])
        prefill_start_loc = start_loc[out.num_decodes : n + 1] - start_loc[out.num_decodes]
        fields["prefill_seq_start_loc"][: len(prefill_start_loc)] = prefill_start_loc
        out.max_decode_seq_len = int(seq_lens[: out.num_decodes].max(initial=0))
        out.max_prefill_seq_len = int(seq_lens[out.num_decodes :].max(initial=0))
        for group, (slots, indptr, last_page_len) in zip(self.batch.decoders, out.groups, strict=True):
            block = group.block_size // self.world
            blocks, offsets = np.divmod(slots[:num_tokens], group.block_size)
            runs, within = np.divmod(offsets, self.interleave)
            rounds, ranks = np.divmod(runs, self.world)
            local = blocks * block + rounds * self.interleave + within
            slots[:num_tokens] = np.where(ranks == self.rank, local, -1)
            np.cumsum(-(-seq_lens // block), out=indptr[1 : n + 1])
            last_page_len[:n] = np.where(seq_lens > 0, (seq_lens - 1) % block + 1, 0)

    def _pad(self, out: StepArena, bucket: StepShape) -> None:
        n, t, reqs, tokens, fields = out.num_reqs, out.num_tokens, bucket.num_reqs, bucket.num_tokens, out.fields
        fields["seq_lens"][n:reqs] = bucket.pad_seq_len
        for name in ("context_lens", "query_lens", "logits_indices"):
            fields[name][n:reqs] = 0
        fields["query_start_loc"][n + 1 : reqs + 1] = t
        fields["positions"][t:tokens] = 0
        fields["token_to_req_indices"][t:tokens] = reqs - 1
        starts = ["seq_start_loc"]
        if self.batch.cross is not None:
            fields["encoder_seq_lens"][n:reqs] = bucket.pad_seq_len
            fields["encoder_query_lens"][n:reqs] = 0
            fields["encoder_query_start_loc"][n + 1 : reqs + 1] = fields["encoder_query_start_loc"][n]
            starts.append("encoder_seq_start_loc")
            out.max_encoder_seq_len = max(out.max_encoder_seq_len, bucket.pad_seq_len if n < reqs else 0)
        for name in starts:
            fields[name][n + 1 : reqs + 1] = fields[name][n] + bucket.pad_seq_len * np.arange(1, reqs - n + 1)
        for g, (slots, indptr, last_page_len) in enumerate(out.groups):
            last_page_len[n:reqs] = 0
            indptr[n + 1 : reqs + 1] = indptr[n]
            if g < len(self.batch.decoders):
                slots[t:tokens] = -1
        out.num_reqs, out.num_tokens, out.num_decode_tokens = reqs, tokens, tokens
        out.max_query_len = out.max_decode_query_len = bucket.query_len
        out.max_decode_seq_len = max(out.max_decode_seq_len, bucket.pad_seq_len if n < reqs else 0)


# ---- the list door ---------------------------------------------------------------------------------------------------


class GroupReader:
    def __init__(self) -> None:
        self.num_seqs = 0
        self.busy = False
        self.entries = np.zeros((0, 9), np.int64)
        self.ids = np.zeros(0, np.int32)

    def enter(self) -> bool:
        busy, self.busy = self.busy, True
        return not busy

    def leave(self) -> None:
        self.busy = False

    def read(self, groups: collections.abc.Iterable[Any]) -> bool:
        entries: list[tuple[int, ...]] = []
        tables: list[Any] = []
        after_decode, num_ids = False, 0
        for group in groups:
            if not isinstance(group, tuple) or len(group) < 3:
                return False
            is_prompt, sequences, hit = group[:3]
            if not isinstance(is_prompt, bool) or not isinstance(hit, bool):
                return False
            if not isinstance(sequences, (list, tuple)) or not sequences or (is_prompt and after_decode):
                return False
            after_decode = after_decode or not is_prompt
            for sequence in sequences:
                if not isinstance(sequence, tuple) or len(sequence) < 4:
                    return False
                seq_id, query_len, context_len = map(_read_int, sequence[:3])
                if seq_id is None or query_len is None or context_len is None:
                    return False
                if query_len < 1 or context_len < 0 or query_len + context_len > INT32_MAX:
                    return False
                if (sequence[3] is None) != (sequences[0][3] is None):
                    return False
                count = -1
                if sequence[3] is not None:
                    table = _read_ids(sequence[3], INT32_MAX + 1)
                    if table is None:
                        return False
                    count = len(table)
                    tables.append(table)
                entries.append((num_ids, count, query_len, context_len, 0, 0, 0, is_prompt, hit))
                num_ids += max(count, 0)
            if len({sequence[0] for sequence in sequences}) != len(sequences):
                return False
        self.num_seqs = len(entries)
        self.entries = np.array(entries, np.int64).reshape(-1, 9)
        self.ids = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        return bool(entries)

    def measure(
        self, block_size: int, window: int, chunked_prefill: bool, hit_anywhere: bool, multi_token_decode: bool
    ) -> tuple[int, ...]:
        code, row, token, sums = _measure(
            self.entries, self.num_seqs, block_size, window, chunked_prefill, hit_anywhere, multi_token_decode
        )
        return int(code), int(row), int(token), *sums.tolist()

    def fill(self, block_size: int, window: int, pad: int, *arrays: Any) -> None:
        _fill_groups(self.entries, self.ids, self.num_seqs, block_size, window, pad, *arrays)

    def fill_table(self, table: Any) -> None:
        _fill_table(self.entries, self.ids, self.num_seqs, table)

    def fill_pages(self, block_size: int, indptr: Any, indices: Any, last_page_len: Any) -> None:
        _fill_pages(self.entries, self.ids, self.num_seqs, block_size, indptr, indices, last_page_len)


# ---- array functions -------------------------------------------------------------------------------------------------


def fill_slot_mapping(block_table: Any, context_lens: Any, query_lens: Any, block_size: int, out: Any) -> None:
    _fill_slot_mapping(block_table, context_lens, query_lens, block_size, out)


def fill_positions(context_lens: Any, query_lens: Any, positions: Any, token_to_req_indices: Any) -> None:
    _fill_positions(context_lens, query_lens, positions, token_to_req_indices)


def fill_page_indices(block_table: Any, indptr: Any, out: Any) -> None:
    for i, (start, stop) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        out[start:stop] = block_table[i, : stop - start]


def fill_block_table(rows: list[Any], out: Any) -> int:
    for i, row in enumerate(rows):
        ids = _read_ids(row, INT32_MAX + 1)
        if ids is None or len(ids) > out.shape[1]:
            return i
        out[i, : len(ids)] = ids
        out[i, len(ids) :] = 0
    return -1


def classify(
    query_lens: Any, context_lens: Any, decode_threshold: int, extend_threshold: int, kinds: Any, counts: Any
) -> None:
    kinds[:] = np.where(query_lens > decode_threshold, 2, 0)
    if len(context_lens):
        kinds[(kinds == 2) & (context_lens > 0) & (query_lens <= extend_threshold)] = 1
    for kind in range(3):
        counts[kind] = (kinds == kind).sum()
        counts[3 + kind] = query_lens[kinds == kind].sum(dtype=np.int64)


def order_kinds(kinds: Any, swaps: Any) -> int:
    return int(_plan_swaps(kinds, len(kinds), (kinds == 0).sum(), (kinds == 1).sum(), swaps))
