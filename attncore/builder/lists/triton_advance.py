"""The Triton kernel that moves the fields of a step of decodes on by one token, on the device, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_ROWS = 256  # that a program moves on


@triton.jit(do_not_specialize=["n", "num_reqs"])
def _advance_rows(  # type: ignore[no-untyped-def]
    seq_lens, block_table, context_lens, positions, slots, starts, last_page_lens, stride, block_size, n, num_reqs,
    has_contexts: tl.constexpr, has_positions: tl.constexpr, has_slots: tl.constexpr, has_starts: tl.constexpr,
    has_pages: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * rows + tl.arange(0, rows)
    running = i < n
    position = tl.load(seq_lens + i, mask=running, other=0)  # the new token's, before the length counts it
    if has_contexts:
        tl.store(context_lens + i, position, mask=running)
    if has_positions:
        tl.store(positions + i, position.to(tl.int64), mask=running)
    if has_slots:
        ids = tl.load(block_table + i.to(tl.int64) * stride + position // block_size, mask=running, other=0)
        tl.store(slots + i, ids.to(tl.int64) * block_size + position % block_size, mask=running)
    if has_starts:  # the rows before count one token more each; padded ones stay as long
        start = tl.load(starts + i + 1, mask=i < num_reqs, other=0)
        tl.store(starts + i + 1, start + tl.minimum(i + 1, n).to(tl.int32), mask=i < num_reqs)
    if has_pages:
        tl.store(last_page_lens + i, position % block_size + 1, mask=running)
    tl.store(seq_lens + i, position + 1, mask=running)


FIELDS = ("context_lens", "positions", "slot_mapping", "seq_start_loc", "paged_kv_last_page_len")
"""What the kernel moves on beside ``seq_lens``, in the order of its arguments."""


def advance_rows(tensors: dict[str, Any], block_size: int, n: int, num_reqs: int) -> None:
    """Moves the first ``n`` of ``num_reqs`` rows on: ``tensors`` are contiguous, on one device, by field.

    ``seq_lens`` and ``block_table`` are required; of FIELDS those that are there. The table holds each row's blocks
    from its first token on, and one for the new token.
    """
    lens, table = tensors["seq_lens"], tensors["block_table"]
    given = [name in tensors for name in FIELDS]
    pointers = [tensors.get(name, lens) for name in FIELDS]
    grid = (triton.cdiv(num_reqs, _ROWS),)
    _advance_rows[grid](lens, table, *pointers, table.stride(0), block_size, n, num_reqs, *given, rows=_ROWS)
