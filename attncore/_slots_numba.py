"""The twin of ``attncore._slots`` in numba: the same classes and functions, for a platform without a C compiler.

Loops are numba functions over NumPy arrays (compiled at first use, kept in numba's cache); what touches Python objects
is plain Python. See _slots.pyi for the types and _slots.pyx for what each does.
"""

from __future__ import annotations

import collections.abc
from array import array as array_of_ints
from typing import Any

import numpy as np
from numba import njit

from attncore.slots import (
    CONTEXT_WITHOUT_CHUNKS,
    HIT_ON_DECODE,
    HIT_WITH_WINDOW,
    INT32_MAX,
    NULL_BLOCK,
    OK,
    QUERY_TOO_LONG,
    TOO_FEW_BLOCKS,
    TOO_LONG,
    TOO_MANY_SEQ_TOKENS,
    TOO_MANY_TOKENS,
)

IMPLEMENTATION = "numba"
READS_INTS = "NumPy"

# Rows of the hot state.
COMPUTED, BLOCKS, COLUMN, BLOCK = range(4)

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
def _check_rows(state, table, block_size, num_rows, query_lens, max_model_len, max_num_tokens):  # type: ignore[no-untyped-def]
    num_tokens, num_seq_tokens = 0, 0
    for i in range(num_rows):
        query_len = query_lens[i]
        if query_len == 0:
            continue
        computed, held = state[0, i], state[1, i]
        if query_len > max_model_len - computed:
            return TOO_LONG, i, 0
        last = (computed + query_len - 1) // block_size
        if last >= held:
            return TOO_FEW_BLOCKS, i, max(held * block_size, computed)
        column = computed // block_size
        if column == state[2, i]:
            column += 1
        while column <= last:
            if table[i, column] == 0:
                return NULL_BLOCK, i, max(column * block_size, computed)
            column += 1
        num_tokens += query_len
        num_seq_tokens += computed + query_len
    if num_tokens > max_num_tokens:
        return TOO_MANY_TOKENS, 0, 0
    if num_seq_tokens > INT32_MAX:
        return TOO_MANY_SEQ_TOKENS, 0, 0
    return OK, 0, 0


@_jit
def _fill_step(  # type: ignore[no-untyped-def]
    state, table, block_size, num_decodes, num_reqs, query_lens,
    slot_mapping, positions, token_rows, seq_lens, context_lens, out_query_lens, logits_indices, last_blocks,
    last_page_len, query_start_loc, seq_start_loc, indptr, prefill_query_start_loc, prefill_seq_start_loc,
):  # fmt: skip
    token, seq_start, pages = 0, 0, 0
    max_query_len, max_decode, max_prefill = 0, 0, 0
    query_start_loc[0] = seq_start_loc[0] = indptr[0] = 0
    decode_seqs = 0
    for i in range(num_reqs):
        query_len = 1 if i < num_decodes else query_lens[i]
        computed = state[0, i]
        seq_len = computed + query_len
        last = (seq_len - 1) // block_size
        _fill_slots(slot_mapping, token, table[i], computed, seq_len, block_size)
        _fill_run(positions, token_rows, token, i, computed, query_len)
        token += query_len
        seq_start += seq_len
        pages += last + 1
        state[0, i], state[2, i], state[3, i] = seq_len, last, table[i, last]
        seq_lens[i], context_lens[i], out_query_lens[i] = seq_len, computed, query_len
        logits_indices[i], last_blocks[i] = token - 1, table[i, last]
        last_page_len[i] = (seq_len - 1) % block_size + 1
        query_start_loc[i + 1], seq_start_loc[i + 1], indptr[i + 1] = token, seq_start, pages
        max_query_len = max(max_query_len, query_len)
        if i < num_decodes:
            decode_seqs = seq_start
            max_decode = max(max_decode, seq_len)
        else:
            max_prefill = max(max_prefill, seq_len)
    prefill_query_start_loc[0] = prefill_seq_start_loc[0] = 0
    for i in range(num_decodes, num_reqs):
        prefill_query_start_loc[i - num_decodes + 1] = query_start_loc[i + 1] - num_decodes
        prefill_seq_start_loc[i - num_decodes + 1] = seq_start_loc[i + 1] - decode_seqs
    return token, max_query_len, max_decode, max_prefill, pages


@_jit
def _swap_rows(state, table, query_lens, i, j, swaps, count):  # type: ignore[no-untyped-def]
    for k in range(max(state[1, i], state[1, j])):
        table[i, k], table[j, k] = table[j, k], table[i, k]
    for k in range(4):
        state[k, i], state[k, j] = state[k, j], state[k, i]
    query_lens[i], query_lens[j] = query_lens[j], query_lens[i]
    swaps[count, 0], swaps[count, 1] = i, j
    return count + 1


@_jit
def _kind(query_len):  # type: ignore[no-untyped-def]
    return 0 if query_len == 1 else (1 if query_len else 2)


@_jit
def _arrange_rows(state, table, query_lens, n, swaps):  # type: ignore[no-untyped-def]
    bounds = np.zeros(4, np.int64)
    bounds[3] = n
    for i in range(n):
        bounds[1] += _kind(query_lens[i]) == 0
        bounds[2] += _kind(query_lens[i]) != 2
    count = 0
    for a in range(2):
        for b in range(a + 1, 3):
            j = bounds[b]
            for i in range(bounds[a], bounds[a + 1]):
                if _kind(query_lens[i]) != b:
                    continue
                while j < bounds[b + 1] and _kind(query_lens[j]) != a:
                    j += 1
                if j == bounds[b + 1]:
                    break
                count = _swap_rows(state, table, query_lens, i, j, swaps, count)
    j = k = -1
    for i in range(bounds[1]):
        b = _kind(query_lens[i])
        if b == 0:
            continue
        c = 3 - b
        j = bounds[b] if j < 0 else j
        while _kind(query_lens[j]) != c:
            j += 1
        k = bounds[c] if k < 0 else k
        while _kind(query_lens[k]) != 0:
            k += 1
        count = _swap_rows(state, table, query_lens, i, j, swaps, count)
        count = _swap_rows(state, table, query_lens, i, k, swaps, count)
    return count, bounds[1], bounds[2]


@_jit
def _needs_block(state, num_rows, block_size, width, out):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(num_rows):
        column = state[0, i] // block_size
        if state[1, i] <= column < width:
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


class BlockRows:
    def __init__(self, state: Any, stale: Any, table: Any, block_size: int, num_blocks: int) -> None:
        self.state, self.table, self.block_size, self.num_blocks = state, table, block_size, num_blocks
        self.capacity, self.width = table.shape
        self.num_rows = 0
        self.dirty = True
        self.changes = 0
        self.req_ids: tuple[Any, ...] = ()
        self.busy = False

    def enter(self) -> bool:
        busy, self.busy = self.busy, True
        return not busy

    def leave(self) -> None:
        self.busy = False

    def start(self, row: int, num_computed: int) -> None:
        self.state[:, row] = num_computed, 0, -1, 0

    def append(self, row: int, ids: Any) -> int:
        array = _read_ids(ids, self.num_blocks)
        held = int(self.state[BLOCKS, row])
        if array is None or len(array) > self.width - held:
            return -1
        self.table[row, held : held + len(array)] = array
        self.state[BLOCKS, row] = held + len(array)
        return len(array)

    def truncate(self, row: int, num_blocks: int) -> None:
        self.table[row, num_blocks : self.state[BLOCKS, row]] = 0
        self.state[BLOCKS, row] = num_blocks
        if self.state[COLUMN, row] >= num_blocks:
            self.state[COLUMN, row] = -1

    def set_computed(self, row: int, num_computed: int) -> None:
        self.state[COMPUTED, row] = num_computed

    def needs_block(self, out: Any) -> int:
        return int(_needs_block(self.state, self.num_rows, self.block_size, self.width, out))


class StepArena:
    # The order in which _fill_step takes an arena's fields.
    ORDER = (
        "slot_mapping", "positions", "token_to_req_indices", "seq_lens", "context_lens", "query_lens",
        "logits_indices", "last_blocks", "paged_kv_last_page_len", "query_start_loc", "seq_start_loc",
        "paged_kv_indptr", "prefill_query_start_loc", "prefill_seq_start_loc",
    )  # fmt: skip

    def __init__(self, fields: dict[str, Any]) -> None:
        self.arrays = tuple(fields[name] for name in self.ORDER)
        self.step = -1
        self.num_reqs = self.num_tokens = self.num_decodes = self.num_prefills = self.num_prefill_tokens = 0
        self.max_query_len = self.max_seq_len = self.max_prefill_seq_len = self.max_decode_seq_len = 0
        self.num_pages = self.changes = 0
        self.req_ids: tuple[Any, ...] = ()
        self.moves: tuple[tuple[int, int], ...] = ()


class StepKernel:
    def __init__(
        self,
        rows: BlockRows,
        arenas: list[StepArena],
        metadata: list[Any],
        query_lens: Any,
        swaps: Any,
        max_model_len: int,
        max_num_tokens: int,
    ) -> None:
        self.rows, self.arenas, self.metadata = rows, arenas, metadata
        self.query_lens, self.swaps = query_lens, swaps
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.next_step = 0

    def decode_step(self) -> Any | None:
        return None if self.rows.busy else self.decode_step_inside()

    def decode_step_inside(self) -> Any | None:
        rows = self.rows
        if rows.dirty:
            return None
        self.schedule_all()
        return self.step(rows.num_rows, rows.num_rows) if self.check()[0] == OK else None

    def schedule_all(self) -> None:
        self.query_lens[: self.rows.num_rows] = 1

    def check(self) -> tuple[int, int, int]:
        rows, limits = self.rows, (self.max_model_len, self.max_num_tokens)
        code, row, token = _check_rows(rows.state, rows.table, rows.block_size, rows.num_rows, self.query_lens, *limits)
        return int(code), int(row), int(token)

    def arrange(self) -> tuple[int, int, int]:
        rows = self.rows
        count, decodes, reqs = _arrange_rows(rows.state, rows.table, self.query_lens, rows.num_rows, self.swaps)
        return int(count), int(decodes), int(reqs)

    def undo(self, num_swaps: int) -> None:
        self.next_step -= 1
        rows, out = self.rows, self.arenas[self.next_step % len(self.arenas)]
        rows.state[COMPUTED, : out.num_reqs] -= self.query_lens[: out.num_reqs]
        taken_back = np.empty((1, 2), np.int32)
        for i, j in self.swaps[:num_swaps][::-1].tolist():
            _swap_rows(rows.state, rows.table, self.query_lens, i, j, taken_back, 0)

    def step(self, num_decodes: int, num_reqs: int) -> Any:
        k = self.next_step % len(self.arenas)
        rows, out, metadata = self.rows, self.arenas[k], self.metadata[k]
        num_tokens, max_query_len, max_decode, max_prefill, pages = map(
            int,
            _fill_step(rows.state, rows.table, rows.block_size, num_decodes, num_reqs, self.query_lens, *out.arrays),
        )
        resized = (num_tokens, num_reqs) != (out.num_tokens, out.num_reqs)
        out.num_reqs, out.num_decodes, out.num_prefills = num_reqs, num_decodes, num_reqs - num_decodes
        out.num_tokens, out.num_prefill_tokens, out.num_pages = num_tokens, num_tokens - num_decodes, pages
        out.max_query_len, out.max_seq_len = max_query_len, max(max_decode, max_prefill)
        out.max_decode_seq_len, out.max_prefill_seq_len = max_decode, max_prefill
        out.step, out.req_ids, out.moves, out.changes = self.next_step, rows.req_ids, (), rows.changes
        self.next_step += 1
        if resized:
            metadata.forget_views()
        return metadata


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
