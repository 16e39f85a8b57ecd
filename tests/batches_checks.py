"""What the random sequences of batches.py look at after each step: every field, against the plain-Python oracle."""

import numpy as np
import oracles
from batches_model import Model


def address_of(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


class StepChecks(Model):
    trees = None
    """The parents of the drafts of each row of the step that is looked at; None: a builder without draft trees."""

    def step(self, scheduled, bucket=None):
        queries = {n: scheduled.get(n, 0 if r.paused else 1) for n, r in self.requests.items()}
        metadata = self.built(scheduled, bucket)
        if bucket is not None:
            self.run(bucket, metadata)
        for i, j in metadata.moves:
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        running = {name for name, query_len in queries.items() if query_len}
        assert set(metadata.req_ids) == running
        assert self.rows[: len(running)] == list(metadata.req_ids)
        kinds = [queries[name] <= self.threshold for name in metadata.req_ids]
        assert kinds == sorted(kinds, reverse=True)
        self.check(metadata, [(self.requests[name], queries[name]) for name in metadata.req_ids], bucket)
        for name in running:
            self.requests[name].computed += queries[name]
            self.requests[name].encoded = True

    def built(self, scheduled, bucket):
        return self.builder.build(scheduled, bucket=bucket)

    def check(self, metadata, running, bucket):
        encoder = {}
        if self.groups[-1].cross:
            size, _ = self.columns(self.groups[-1], [])
            held = [self.columns(self.groups[-1], r.blocks[self.groups[-1].name])[1] for r, _ in running]
            rows = [(b, r.encoder, 0 if r.encoded else r.encoder) for b, (r, _) in zip(held, running, strict=True)]
            encoder = oracles.persistent_encoder(rows, size)
        for group in self.groups:
            rows = [(*self.columns(group, r.blocks[group.name])[1:], r.computed, q) for r, q in running]
            self.check_group(metadata, group, rows, encoder, bucket)

    def check_group(self, metadata, group, rows, encoder, bucket):
        of_group = metadata.groups[group.name]
        size, _ = self.columns(group, [])
        if group.cross:
            expected = oracles.lengths([b for b, _, _ in rows], encoder["encoder_seq_lens"], size, 0)
            expected = {n: expected[n] for n in ("seq_lens", "seq_start_loc", "paged_kv_indices", "max_seq_len")}
        elif self.ranks:
            ranks = self.ranks
            own = ranks.block_size, ranks.world_size, ranks.rank, ranks.interleave
            expected = oracles.rank_step(rows, *own, self.threshold)
        else:
            expected = oracles.persistent_step(rows, size, self.threshold)
            if self.trees is not None:
                expected |= oracles.tree_fields(rows, self.trees)
        if bucket is not None and not group.cross:
            rows_of, each, in_all = bucket, self.captured.get(bucket), None
            if each is None:
                (rows_of, in_all), each = bucket, bucket[1]
            expected = oracles.padded(expected | encoder, rows_of, each, self.pad_seq_len, in_all)
        elif bucket is None:
            expected |= encoder
        for name, value in expected.items():
            if bucket is not None and group.cross and name != "paged_kv_indices":
                continue  # what a cross group shares is looked at with the others
            for found in (getattr(of_group, name), getattr(of_group.host, name, None)):
                if found is not None:
                    assert (found.tolist() if hasattr(found, "tolist") else found) == value, name
        for row, (blocks, _, _) in enumerate(rows):
            tail = [0] * (of_group.block_table.shape[1] - len(blocks))
            assert of_group.host.block_table[row].tolist() == blocks + tail
            assert of_group.block_table[row].tolist()[: len(blocks)] == blocks
        if bucket is not None:
            assert of_group.use_cuda_graph
            for name, address in self.addresses[bucket].items():
                if group.name == self.groups[0].name:
                    assert address_of(of_group._device[name]) == address
        elif not self.ranks and not group.cross:
            self.check_views(of_group, rows, size)

    def check_views(self, metadata, rows, block_size):
        decodes = [row for row in rows if row[2] <= self.threshold]
        prefills = rows[len(decodes) :]
        trees = [None] * len(rows) if self.trees is None else self.trees
        for part, view, of_part in (
            (decodes, metadata.decode_metadata, trees[: len(decodes)]),
            (prefills, metadata.prefill_metadata, trees[len(decodes) :]),
        ):
            if not part:
                assert view is None
                continue
            fields = oracles.persistent_step(part, block_size, self.threshold)
            if self.trees is not None:
                fields |= oracles.tree_fields(part, of_part)
            for name, expected in fields.items():
                for value in (getattr(view, name), getattr(view.host, name, None)):
                    if value is not None:
                        assert (value.tolist() if hasattr(value, "tolist") else value) == expected, name
