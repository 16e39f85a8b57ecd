"""Context parallelism: the lengths, slots and pages that one rank keeps of a step."""

from __future__ import annotations

from typing import NamedTuple

from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.step_arena import StepArena


class Ranks(NamedTuple):
    """Which tokens a rank keeps: turns of ``interleave`` tokens go to ranks 0, 1, ... of ``world``."""

    world: int
    rank: int
    interleave: int


@jit
def local_len(seq_len, world, rank, interleave):
    turn = world * interleave
    rest = seq_len % turn - rank * interleave
    return seq_len // turn * interleave + min(max(rest, 0), interleave)


@jit
def keep_local_slots(slots, num_tokens, block_size, world, rank, interleave):
    local_size = block_size // world
    for t in range(num_tokens):
        block, offset = slots[t] // block_size, slots[t] % block_size
        run = offset // interleave
        slots[t] = PAD_SLOT_ID
        if run % world == rank:
            slots[t] = block * local_size + run // world * interleave + offset % interleave


@jit
def keep_local_lengths(
    num_reqs, num_decodes, context_lens, seq_lens, seq_start_loc, prefill_seq_start_loc, world, rank, interleave
):  # fmt: skip
    """(tokens of all sequences, the longest sequence of decodes, of prefills)."""
    seq_start = longest_decode = longest_prefill = 0
    for i in range(num_reqs):
        context_lens[i] = local_len(context_lens[i], world, rank, interleave)
        seq_lens[i] = local_len(seq_lens[i], world, rank, interleave)
        seq_start += seq_lens[i]
        seq_start_loc[i + 1] = seq_start
        if i < num_decodes:
            longest_decode = max(longest_decode, seq_lens[i])
        else:
            longest_prefill = max(longest_prefill, seq_lens[i])
            prefill_seq_start_loc[i - num_decodes + 1] = seq_start - seq_start_loc[num_decodes]
    return seq_start, longest_decode, longest_prefill


@jit
def keep_local_pages(num_reqs, seq_lens, indptr, last_page_len, local_size):
    """How many pages the group then has."""
    pages = 0
    for i in range(num_reqs):
        pages += (seq_lens[i] + local_size - 1) // local_size
        indptr[i + 1] = pages
        last_page_len[i] = (seq_lens[i] - 1) % local_size + 1 if seq_lens[i] else 0
    return pages


def keep_local(out: StepArena, batch: BatchState, ranks: Ranks) -> None:
    groups = list(zip(out.groups, batch.decoders, strict=True))
    for fields, table in groups:
        keep_local_slots(fields.slot_mapping, out.num_tokens, table.block_size, *ranks)
    out.num_seq_tokens, out.max_decode_seq_len, out.max_prefill_seq_len = keep_local_lengths(
        out.num_reqs, out.num_decodes, out.context_lens, out.seq_lens, out.seq_start_loc, out.prefill_seq_start_loc,
        *ranks,
    )  # fmt: skip
    for fields, table in groups:
        if not fields.shares_pages:
            fields.num_pages = keep_local_pages(
                out.num_reqs, out.seq_lens, fields.paged_kv_indptr, fields.paged_kv_last_page_len,
                table.block_size // ranks.world,
            )  # fmt: skip
