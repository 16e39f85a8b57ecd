"""A little engine with the interface of nano-vllm's modules, for tests of benchmarks/nano_vllm.py: written for them.

One batch at a time, whose sequences start together; blocks are given out one after another, and come back at the end.
"""

import itertools
import types
from dataclasses import dataclass

SIZE = 256


@dataclass
class Context:
    is_prefill: bool = False
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: object = None
    context_lens: object = None
    block_tables: object = None


step = Context()


def set_context(*args, **kwargs):
    global step
    step = Context(*args, **kwargs)


def get_context():
    return step


class Sequence:
    block_size = SIZE
    ids = itertools.count()

    def __init__(self, token_ids, params):
        self.seq_id, self.token_ids, self.left = next(self.ids), list(token_ids), params.max_tokens
        self.temperature, self.block_table = params.temperature, []
        self.num_cached_tokens = self.num_scheduled_tokens = 0


class Scheduler:
    def __init__(self, config):
        self.waiting, self.running, self.budget = [], [], config.max_num_batched_tokens
        self.block_manager = types.SimpleNamespace(
            free_block_ids=list(range(config.num_kvcache_blocks)), deallocate=self._deallocate
        )

    def preempt(self, seq):
        raise NotImplementedError

    def add(self, seq):
        self.waiting.append(seq)

    def is_finished(self):
        return not (self.waiting or self.running)

    def schedule(self):
        seqs = self.waiting[:1] or list(self.running)
        for seq in seqs:
            seq.num_scheduled_tokens = min(len(seq.token_ids) - seq.num_cached_tokens, self.budget)
            while len(seq.block_table) * SIZE < len(seq.token_ids):
                seq.block_table.append(self.block_manager.free_block_ids.pop(0))
        return seqs, bool(self.waiting)

    def postprocess(self, seqs, tokens, is_prefill):
        for seq, token in zip(seqs, tokens, strict=True):
            seq.num_cached_tokens += seq.num_scheduled_tokens
            if seq.num_cached_tokens < len(seq.token_ids):
                continue
            if is_prefill:
                self.running.append(self.waiting.pop(0))
            seq.token_ids.append(token)
            seq.left -= 1
            if not seq.left:
                self.running.remove(seq)
                self.block_manager.deallocate(seq)

    def _deallocate(self, seq):
        self.block_manager.free_block_ids += seq.block_table
        seq.block_table = []


def runner_of(namespace):
    """A ModelRunner whose tensors are made by the ``torch`` of its module's ``namespace``."""

    class ModelRunner:
        def _tensor(self, numbers, dtype):
            made = namespace["torch"].tensor(numbers, dtype=getattr(namespace["torch"], dtype), pin_memory=True)
            return made.cuda(non_blocking=True)

        def _common(self, seqs):
            spans = [range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
            pairs = list(zip(seqs, spans, strict=True))
            ids = [seq.token_ids[at] for seq, span in pairs for at in span]
            slots = [seq.block_table[at // SIZE] * SIZE + at % SIZE for seq, span in pairs for at in span]
            widest = max(len(seq.block_table) for seq in seqs)
            table = [[*seq.block_table, *[-1] * (widest - len(seq.block_table))] for seq in seqs]
            tensors = (self._tensor(numbers, "int64") for numbers in (ids, [at for span in spans for at in span]))
            return *tensors, spans, self._tensor(slots, "int32"), self._tensor(table, "int32")

        def prepare_prefill(self, seqs):
            ids, positions, spans, slots, table = self._common(seqs)
            starts = [[0, *itertools.accumulate(counts)] for counts in (map(len, spans), [one.stop for one in spans])]
            tensors = (self._tensor(one, "int32") for one in starts)
            longest = max(map(len, spans)), max(span.stop for span in spans)
            set_context(True, *tensors, *longest, slots, None, table if starts[0] != starts[1] else None)
            return ids, positions

        def prepare_decode(self, seqs):
            ids, positions, spans, slots, table = self._common(seqs)
            lens = self._tensor([span.stop for span in spans], "int32")
            set_context(False, slot_mapping=slots, context_lens=lens, block_tables=table)
            return ids, positions

        def prepare_sample(self, seqs):
            return self._tensor([seq.temperature for seq in seqs], "float32")

    return ModelRunner
