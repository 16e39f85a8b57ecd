"""Context parallelism: the lengths, slots and pages that one rank keeps of a step."""

from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.numba.block_table import TABLE_VIEW
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import Struct, lengths_at, longs_at, struct_at, wide
from attncore.kernels.numba.step_arena import group_at

RANKS = Struct("world", "rank", "interleave")
"""The C struct Ranks: turns of ``interleave`` tokens go to ranks 0, 1, ... of ``world``."""


@jit
def local_len(seq_len, ranks):
    turn = ranks.world * ranks.interleave
    rest = seq_len % turn - ranks.rank * ranks.interleave
    return seq_len // turn * ranks.interleave + min(max(rest, 0), ranks.interleave)


@jit
def keep_local_slots(slots, num_tokens, block_size, ranks):
    local_size = block_size // ranks.world
    for t in range(num_tokens):
        block, offset = slots[t] // block_size, slots[t] % block_size
        run = offset // ranks.interleave
        slots[t] = PAD_SLOT_ID
        if run % ranks.world == ranks.rank:
            slots[t] = block * local_size + run // ranks.world * ranks.interleave + offset % ranks.interleave


@jit
def keep_local_lengths(out, ranks):
    seq_start = 0
    seq_starts, prefill_seqs = lengths_at(out.seq_start_loc), lengths_at(out.prefill_seq_start_loc)
    out.max_decode_seq_len = out.max_prefill_seq_len = 0
    for i in range(out.num_reqs):
        lengths_at(out.context_lens)[i] = local_len(wide(lengths_at(out.context_lens)[i]), ranks)
        seq_len = local_len(wide(lengths_at(out.seq_lens)[i]), ranks)
        lengths_at(out.seq_lens)[i] = seq_len
        seq_start += seq_len
        seq_starts[i + 1] = seq_start
        if i < out.num_decodes:
            out.max_decode_seq_len = max(out.max_decode_seq_len, seq_len)
        else:
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, seq_len)
            prefill_seqs[i - out.num_decodes + 1] = seq_start - seq_starts[out.num_decodes]
    out.num_seq_tokens = seq_start


@jit
def keep_local_pages(out, group, local_size):
    pages = 0
    for i in range(out.num_reqs):
        seq_len = wide(lengths_at(out.seq_lens)[i])
        pages += (seq_len + local_size - 1) // local_size
        lengths_at(group.paged_kv_indptr)[i + 1] = pages
        lengths_at(group.paged_kv_last_page_len)[i] = (seq_len - 1) % local_size + 1 if seq_len else 0
    group.num_pages = pages


@jit
def keep_local(out, batch, ranks):
    for g in range(batch.num_decoders):
        block_size = struct_at(longs_at(batch.decoders)[g], TABLE_VIEW).tokens
        keep_local_slots(longs_at(group_at(out, g).slot_mapping), out.num_tokens, block_size, ranks)
    keep_local_lengths(out, ranks)
    for g in range(batch.num_decoders):
        if not group_at(out, g).shares_pages:
            block_size = struct_at(longs_at(batch.decoders)[g], TABLE_VIEW).tokens
            keep_local_pages(out, group_at(out, g), block_size // ranks.world)
