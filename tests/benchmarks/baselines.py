"""What engines do instead, as well as each way allows. Kept as the comparison; nothing of attncore is used."""

import numpy as np


def plain_python(rows, block_size):
    """The list way: slots appended token by token, rows written one by one into a rectangle.

    ``rows``: (block ids, computed, query_len). The list builder's fields for decodes.
    """
    slot_mapping, seq_lens, context_lens, query_lens = [], [], [], []
    query_start_loc, seq_start_loc, positions, token_to_req, logits_indices = [0], [0], [], [], []
    for row, (blocks, computed, query_len) in enumerate(rows):
        seq_len = computed + query_len
        for i in range(computed, seq_len):
            slot_mapping.append(blocks[i // block_size] * block_size + i % block_size)
            positions.append(i)
            token_to_req.append(row)
        seq_lens.append(seq_len)
        context_lens.append(computed)
        query_lens.append(query_len)
        query_start_loc.append(query_start_loc[-1] + query_len)
        seq_start_loc.append(seq_start_loc[-1] + seq_len)
        logits_indices.append(query_start_loc[-1] - 1)
    width = max(len(blocks) for blocks, _, _ in rows)
    block_table = np.zeros((len(rows), width), np.int32)
    for i, (blocks, _, _) in enumerate(rows):
        block_table[i, : len(blocks)] = blocks
    return (
        np.array(slot_mapping, np.int64),
        np.array(positions, np.int64),
        np.array(token_to_req, np.int32),
        np.array(logits_indices, np.int32),
        np.array(seq_lens, np.int32),
        np.array(context_lens, np.int32),
        np.array(query_lens, np.int32),
        np.array(query_start_loc, np.int32),
        np.array(seq_start_loc, np.int32),
        block_table,
    )


class Vectorised:
    """The NumPy way: state and buffers kept, any query lengths in one pass (repeat, divmod, one fancy index).

    Every host field that the persistent builder builds, the rectangle and the page indices apart.
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
        self.last_page_len, self.logits_indices = (np.empty(n, np.int32) for _ in range(2))

    def step(self):
        n = len(self.computed)
        query_lens, starts = self.query_lens, self.query_start_loc
        np.cumsum(query_lens, out=starts[1:])
        total = int(starts[n])
        token_to_req = np.repeat(self.counting[:n], query_lens)
        np.copyto(self.context_lens, self.computed)
        positions = self.positions[:total]
        np.add((self.computed - starts[:n])[token_to_req], self.counting[:total], out=positions)
        self.fill_slots(positions, token_to_req, self.slot_mapping[:total])
        np.add(self.computed, query_lens, out=self.seq_lens)
        np.cumsum(self.seq_lens, out=self.seq_start_loc[1:])
        np.subtract(starts[1:], 1, out=self.logits_indices)
        self.fill_pages()
        num_decodes = int(np.count_nonzero(query_lens == 1))
        maxima = int(query_lens.max()), int(self.seq_lens.max())
        self.computed += query_lens
        return total, num_decodes, maxima, token_to_req

    def fill_slots(self, positions, token_to_req, slots):
        columns, offsets = np.divmod(positions, self.block_size)
        np.multiply(self.table[token_to_req, columns], self.block_size, out=slots, dtype=np.int64)
        slots += offsets

    def fill_pages(self):
        size = self.block_size
        np.floor_divide(self.seq_lens + (size - 1), size, out=self.pages)
        np.cumsum(self.pages, out=self.indptr[1:])
        np.subtract(self.seq_lens, (self.pages - 1) * size, out=self.last_page_len)


class VectorisedGroups:
    """Several KV-cache groups: a whole pass for each, or (``step_sharing``) what they share once, the rest for each."""

    def __init__(self, rows, blocks, block_sizes):
        tables = [
            [row._replace(blocks=of_row[group]) for row, of_row in zip(rows, blocks, strict=True)]
            for group in range(len(block_sizes))
        ]
        self.passes = [Vectorised(*of_group, len(rows)) for of_group in zip(tables, block_sizes, strict=True)]

    def step(self):
        for one in self.passes:
            one.step()

    def step_sharing(self):
        first, *others = self.passes
        positions = first.computed.astype(np.int64)
        *_, token_to_req = first.step()
        for one in others:
            one.fill_slots(positions, token_to_req, one.slot_mapping)
            np.copyto(one.seq_lens, first.seq_lens)
            one.fill_pages()


class Tuned(Vectorised):
    """The same fields by shifts, a flat table and temporaries kept, for powers of two; decodes gather nothing twice.

    How far NumPy goes when somebody spends a day on it: shown beside the plain vectorised way, which is the goal's.
    """

    def __init__(self, rows, block_size, max_tokens):
        super().__init__(rows, block_size, max_tokens)
        n, width = self.table.shape
        self.shift, self.mask = block_size.bit_length() - 1, block_size - 1
        self.flat, self.row_starts = self.table.reshape(-1), np.arange(n, dtype=np.int64) * width
        self.cells, self.bases = np.empty(max_tokens, np.int64), np.empty(max_tokens, np.int64)
        self.blocks, self.tokens = np.empty(max_tokens, np.int32), np.arange(max_tokens, dtype=np.int64)
        self.lasts, self.shifts = np.empty(n, np.int32), np.empty(n, np.int64)

    def step(self):
        query_lens, starts, computed = self.query_lens, self.query_start_loc, self.computed
        n = len(computed)
        query_lens.cumsum(out=starts[1:])
        total = int(starts[n])
        self.context_lens[:] = computed
        token_to_req = self.counting[:n].repeat(query_lens)
        positions, cells, slots = self.positions[:total], self.cells[:total], self.slot_mapping[:total]
        if total == n and query_lens.max() == 1:
            positions[:] = computed
            bases = self.row_starts
        else:
            np.subtract(computed, starts[:n], out=self.shifts)
            self.shifts.take(token_to_req, out=positions, mode="clip")
            positions += self.tokens[:total]
            bases = self.row_starts.take(token_to_req, out=self.bases[:total], mode="clip")
        np.right_shift(positions, self.shift, out=cells)
        cells += bases
        slots[:] = self.flat.take(cells, out=self.blocks[:total], mode="clip")
        slots <<= self.shift
        slots += np.bitwise_and(positions, self.mask, out=cells)
        np.add(computed, query_lens, out=self.seq_lens)
        self.seq_lens.cumsum(out=self.seq_start_loc[1:])
        np.subtract(starts[1:], 1, out=self.logits_indices)
        np.subtract(self.seq_lens, 1, out=self.lasts)
        np.right_shift(self.lasts, self.shift, out=self.pages)
        self.pages += 1
        self.pages.cumsum(out=self.indptr[1:])
        self.lasts &= self.mask
        np.add(self.lasts, 1, out=self.last_page_len)
        num_decodes = int(np.count_nonzero(query_lens == 1))
        maxima = int(query_lens.max()), int(self.seq_lens.max())
        computed += query_lens
        return total, num_decodes, maxima, token_to_req


def copy_of(num_bytes):
    """The floor: a memory copy of as many bytes as a build writes; the callable."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)
