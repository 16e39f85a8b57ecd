"""A shared prefix on the device: both passes of ``attncore.builder.plan_cascade``, ready for a layer's calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_flash.parts import Part
from attn_flash.rows import Rows
from attncore.builder import CascadeRule, find_shared_prefix, plan_cascade
from attncore.builder.blocks.cascade import CascadePass


class CascadeStep(NamedTuple):
    """One step's passes, made once for all layers."""

    token_indices: Tensor
    """int64: the tokens that the first pass takes."""
    prefix: Rows
    prefix_part: Part
    suffix: Rows
    suffix_part: Part


def cascade_step(metadata: Any, block_size: int, device: str, rule: CascadeRule | None) -> CascadeStep | None:
    """The two passes where sharing pays by ``rule``, else None. Copies to ``device`` wait for nothing.

    None, too, for a step that was built overlapped: the host does not know its lengths.
    """
    if metadata.builder is not None and metadata.builder.host_lengths(metadata) != "exact":
        return None
    host = metadata.host
    null_block = None if metadata.from_groups else 0
    table = host.block_table[: len(host.context_lens)]
    shared = find_shared_prefix(table, host.context_lens, block_size, rule, null_block=null_block)
    if shared is None:
        return None
    rows = len(host.query_lens)
    cascade = plan_cascade(shared, table[:rows], host.query_lens, host.seq_lens[:rows])

    def sent(array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def one(name: CascadePass) -> tuple[Rows, Part]:
        starts, lengths = name.query_start_loc, name.seq_lens
        sums = sent(name.seq_start_loc)
        on_device = Rows(sent(name.block_table), sent(lengths), sent(starts), sums, sums)
        longest_query = int(np.diff(starts).max())
        return on_device, Part("paged", 0, len(lengths), 0, int(starts[-1]), 0, longest_query, int(lengths.max()))

    return CascadeStep(sent(cascade.token_indices), *one(cascade.prefix), *one(cascade.suffix))
