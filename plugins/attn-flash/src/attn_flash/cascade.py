"""A shared prefix on the device: both passes of ``attncore.builder.plan_cascade``, ready for a layer's calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_flash.segments import Segment
from attncore import AttentionMetadata
from attncore.builder import CascadePass, CascadeRule, find_shared_prefix, plan_cascade


class CascadeStep(NamedTuple):
    """One step's passes, made once for all layers."""

    token_indices: Tensor
    """int64: the tokens that the first pass takes."""
    prefix: Segment
    suffix: Segment


def cascade_step(
    metadata: AttentionMetadata, block_size: int, device: str, rule: CascadeRule | None
) -> CascadeStep | None:
    """The two passes where sharing pays by ``rule``, else None. Copies to ``device`` wait for nothing.

    None, too, for a step that was built overlapped, and for views of one: the host does not know its lengths; for an
    adopted one elsewhere than on a CPU: the host has no block table; and for a step of the list builder with a prompt
    without context, which may have none: both passes read the cache.
    """
    host = metadata.host
    table = getattr(host, "block_table", None)
    plain = metadata.from_groups and not host.context_lens[: metadata.num_prefills].all()
    if table is None or plain or metadata.host_lengths != "exact":
        return None
    null_block = None if metadata.from_groups else 0
    table = table[: len(host.context_lens)]
    shared = find_shared_prefix(table, host.context_lens, block_size, rule, null_block=null_block)
    if shared is None:
        return None
    query_lens = np.diff(host.query_start_loc)
    rows = len(query_lens)
    cascade = plan_cascade(shared, table[:rows], query_lens, host.seq_lens[:rows])

    def sent(array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def segment(of: CascadePass) -> Segment:
        starts, lengths = of.query_start_loc, of.seq_lens
        sums = sent(of.seq_start_loc)
        return Segment(
            "paged", 0, len(lengths), 0, int(starts[-1]), 0,
            max_query_len=int(np.diff(starts).max()), max_seq_len=int(lengths.max()),
            block_table=sent(of.block_table), lengths=sent(lengths), query_starts=sent(starts), key_sums=sums,
            key_starts=sums,
        )  # fmt: skip

    return CascadeStep(sent(cascade.token_indices), segment(cascade.prefix), segment(cascade.suffix))
