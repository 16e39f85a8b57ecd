"""The least that a decode step of nano-vllm can cost the host: for benchmarks/nano_vllm.py."""

import torch
from nano_checkout import LONGEST, SIZE


class Floor:
    """In place of ``Metadata``: the host sends the tokens that were sampled, the device adds one to the last step's
    lengths, positions and slots. Prefills, and the first step of a number of rows, are nano-vllm's own.

    Slots are wrong behind the end of a block, and so are tokens then.
    """

    def __init__(self, nano, runner):
        self.nano, self.rows = nano, 0
        # As they are now: what is timed stands in their place later.
        self.prepare_prefill, self.theirs, self.sample = (
            runner.prepare_prefill,
            runner.prepare_decode,
            runner.prepare_sample,
        )

    def prepare_decode(self, seqs):
        if len(seqs) != self.rows:
            self.inputs, self.temperatures, self.rows = self.theirs(seqs), self.sample(seqs), len(seqs)
            context = self.nano.get_context()
            self.lens, self.slots = context.context_lens, context.slot_mapping
            self.tables = context.block_tables.new_ones((self.rows, LONGEST // SIZE))  # some block for what follows
            self.tables[:, : context.block_tables.shape[1]] = context.block_tables.clamp(min=1)
        else:
            torch._foreach_add_([self.inputs[1], self.lens, self.slots], 1)
        self.nano.set_context(False, slot_mapping=self.slots, context_lens=self.lens, block_tables=self.tables)
        return self.inputs

    def prepare_sample(self, seqs):
        return self.temperatures if len(seqs) == self.rows else self.sample(seqs)

    def sampled(self, token_ids):
        if len(token_ids) == self.rows:
            sent = torch.tensor(token_ids, pin_memory=self.inputs[0].is_cuda)
            self.inputs[0].copy_(sent, non_blocking=True)
