"""What engines do instead, as well as each way allows. Kept as the comparison; nothing of attncore is used."""

import numpy as np


def plain_python(rows, block_size):
    """The list way: slots appended token by token, rows written one by one into a rectangle.

    ``rows``: (block ids, computed, query_len). The list door's fields for decodes.
    """
    slot_mapping, seq_lens, context_lens, query_lens = [], [], [], []
    query_start_loc, seq_start_loc, positions = [0], [0], []
    for blocks, computed, query_len in rows:
        seq_len = computed + query_len
        for i in range(computed, seq_len):
            slot_mapping.append(blocks[i // block_size] * block_size + i % block_size)
            positions.append(i)
        seq_lens.append(seq_len)
        context_lens.append(computed)
        query_lens.append(query_len)
        query_start_loc.append(query_start_loc[-1] + query_len)
        seq_start_loc.append(seq_start_loc[-1] + seq_len)
    width = max(len(blocks) for blocks, _, _ in rows)
    block_table = np.zeros((len(rows), width), np.int32)
    for i, (blocks, _, _) in enumerate(rows):
        block_table[i, : len(blocks)] = blocks
    return (
        np.array(slot_mapping, np.int64),
        np.array(positions, np.int64),
        np.array(seq_lens, np.int32),
        np.array(context_lens, np.int32),
        np.array(query_lens, np.int32),
        np.array(query_start_loc, np.int32),
        np.array(seq_start_loc, np.int32),
        block_table,
    )


class Vectorised:
    """The NumPy way: state and buffers kept, any query lengths in one pass (repeat, divmod, one fancy index).

    Every host field that the persistent door builds, the rectangle and the page indices apart.
    """

    def __init__(self, rows, block_size, max_tokens):
        n, width = len(rows), max(len(row.blocks) for row in rows)
        self.block_size = block_size
        self.table = np.zeros((n, width), np.int32)
        for i, row in enumerate(rows):
            self.table[i, : len(row.blocks)] = row.blocks
        self.computed = np.array([row.computed for row in rows], np.int32)
        self.query_lens = np.array([row.query_len for row in rows], np.int32)
        self.counting = np.arange(max(max_tokens, n) + 1, dtype=np.int32)
        self.slot_mapping, self.positions = np.empty(max_tokens, np.int64), np.empty(max_tokens, np.int64)
        self.query_start_loc, self.seq_start_loc, self.indptr = (np.zeros(n + 1, np.int32) for _ in range(3))
        self.seq_lens, self.context_lens, self.pages = (np.empty(n, np.int32) for _ in range(3))
        self.last_page_len, self.last_blocks, self.logits_indices = (np.empty(n, np.int32) for _ in range(3))

    def step(self):
        n, size = len(self.computed), self.block_size
        query_lens, starts = self.query_lens, self.query_start_loc
        np.cumsum(query_lens, out=starts[1:])
        total = int(starts[n])
        token_to_req = np.repeat(self.counting[:n], query_lens)
        np.copyto(self.context_lens, self.computed)
        positions = self.positions[:total]
        np.add((self.computed - starts[:n])[token_to_req], self.counting[:total], out=positions)
        columns, offsets = np.divmod(positions, size)
        slots = self.slot_mapping[:total]
        np.multiply(self.table[token_to_req, columns], size, out=slots, dtype=np.int64)
        slots += offsets
        np.add(self.computed, query_lens, out=self.seq_lens)
        np.cumsum(self.seq_lens, out=self.seq_start_loc[1:])
        np.subtract(starts[1:], 1, out=self.logits_indices)
        np.floor_divide(self.seq_lens + (size - 1), size, out=self.pages)
        np.cumsum(self.pages, out=self.indptr[1:])
        np.subtract(self.seq_lens, (self.pages - 1) * size, out=self.last_page_len)
        self.last_blocks[:] = self.table[self.counting[:n], self.pages - 1]
        num_decodes = int(np.count_nonzero(query_lens == 1))
        maxima = int(query_lens.max()), int(self.seq_lens.max())
        self.computed += query_lens
        return total, num_decodes, maxima, token_to_req


def copy_of(num_bytes):
    """The floor: a memory copy of as many bytes as a build writes; the callable."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)
