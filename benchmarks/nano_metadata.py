"""What nano-vllm's ModelRunner prepares for a step, by attncore: for benchmarks/nano_vllm.py."""

import numpy as np
from nano_checkout import SIZE

import attncore


class Metadata:
    """What ModelRunner prepares for a step, by attncore. The batch follows the sequences that the scheduler gives."""

    def __init__(self, nano, backend, *, max_num_seqs, max_model_len, max_num_batched_tokens, num_blocks):
        self.nano, self.seqs, self.in_rows, self.metadata = nano, {}, None, None
        self.batch = attncore.InputBatch(
            max_num_reqs=max_num_seqs, max_model_len=max_model_len, block_size=SIZE, num_blocks=num_blocks
        )
        self.builder = attncore.MetadataBuilder(self.batch, backend, max_num_batched_tokens=max_num_batched_tokens)
        self.input_ids = self.batch.token_column("input_ids", np.int64)
        self.temperature = self.batch.column("temperature", np.float32)
        for column in (self.input_ids, self.temperature):
            self.builder.register_column(column)

    def prepare_prefill(self, seqs):
        for seq in seqs:
            if seq.seq_id not in self.seqs:
                self.batch.add_request(seq.seq_id, seq.block_table, seq.num_cached_tokens)
                self.input_ids.give(seq.seq_id, seq.token_ids)
                self.temperature[seq.seq_id] = seq.temperature
                self.seqs[seq.seq_id] = seq
        counts = dict.fromkeys(self.seqs, 0) | {seq.seq_id: seq.num_scheduled_tokens for seq in seqs}
        step = self._built(counts, seqs)
        cached = bool(step.host.context_lens.any())
        self.nano.set_context(
            True, step.query_start_loc, step.seq_start_loc, step.max_query_len, step.max_seq_len, step.slot_mapping,
            None, step.block_table if cached else None,
        )  # fmt: skip
        return step.input_ids, step.positions

    def prepare_decode(self, seqs):
        for name in self.batch.needs_block():
            self.batch.append_blocks(name, self.seqs[name].block_table[-1:])
        step = self._built(None, seqs)
        self.nano.set_context(
            False, slot_mapping=step.slot_mapping, context_lens=step.seq_lens, block_tables=step.block_table
        )
        return step.input_ids, step.positions

    def prepare_sample(self, seqs):
        return self.metadata.temperature

    def _built(self, counts, seqs):
        """The step's metadata. Its rows stand in the batch's order, and so do ``seqs`` and their tokens then."""
        if counts is None and len(seqs) < len(self.seqs):
            counts = dict.fromkeys(self.seqs, 0) | dict.fromkeys((seq.seq_id for seq in seqs), 1)
        step = self.metadata = self.builder.build() if counts is None else self.builder.build(counts)
        if counts is not None:
            seqs[:], self.in_rows = [self.seqs[name] for name in step.req_ids], None
        else:
            if self.in_rows is None:
                self.in_rows = [self.seqs[name] for name in step.req_ids]
            seqs[:] = self.in_rows
        return step

    def sampled(self, token_ids):
        """The tokens of the last step, in the order of its rows: the next one's inputs."""
        self.input_ids.write(self.metadata, token_ids)

    def left(self, seq):
        """A sequence finished, or was preempted: its blocks go back to the pool."""
        if self.seqs.pop(seq.seq_id, None) is not None:
            self.batch.remove_request(seq.seq_id)
            self.in_rows = None

    def follow(self, manager):
        """Has ``left`` called wherever the pool takes blocks back."""
        deallocate = manager.deallocate

        def told(seq):
            self.left(seq)
            deallocate(seq)

        manager.deallocate = told
