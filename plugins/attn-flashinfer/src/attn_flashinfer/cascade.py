"""A prefix that many requests of a step share is read once: a pass over it, a pass over the rest, states merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_flashinfer.library import Library
from attn_flashinfer.pages import Pages, tensor_over
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import EagerAppend, LayerSettings
from attncore import AttentionMetadata
from attncore.builder import CascadeRule, SharedPrefix, find_shared_prefix


class Cascade:
    """Both passes, for all rows of an eager step, prompts and decodes alike.

    The second pass needs no list of pages of its own: in the step's list a request's shared pages stand before its
    others, so that each request becomes two rows there, the first of them without a query.
    """

    def __init__(self, library: Library, workspace: Workspace, settings: LayerSettings, rule: CascadeRule) -> None:
        self._rule, self._block_size = rule, settings.shape.block_size
        self._device, self._merge = settings.shape.device, library.merge_state_in_place
        self._prefix = EagerAppend(library, workspace, settings, causal=False)
        self._rest = EagerAppend(library, workspace, settings)
        self._tokens: Tensor | None = None

    def plan(self, metadata: AttentionMetadata, pages: Pages) -> bool:
        """Plans both passes where enough of the step is shared; whether it did."""
        host = metadata.host
        shared = self._shared(metadata)
        if shared is None:
            return False
        starts = host.query_start_loc
        self._plan_prefix(metadata, pages, shared, np.diff(starts))
        rows, indptr = shared.rows, pages.indptr.numpy()
        num_rows = len(starts) - 1
        begins = indptr[:-1].copy()
        begins[rows] += shared.num_blocks
        doubled = np.empty(2 * num_rows + 1, np.int32)  # where each row's shared pages begin, and where its others do
        doubled[0:-1:2], doubled[1::2], doubled[-1] = indptr[:-1], begins, indptr[-1]
        queries = np.empty(2 * num_rows + 1, np.int32)
        queries[0::2], queries[1::2] = starts, starts[:-1]
        last = np.empty(2 * num_rows, np.int32)
        last[0::2], last[1::2] = np.where(begins > indptr[:-1], self._block_size, 0), pages.last_page_len.numpy()
        lens = np.empty(2 * num_rows, np.int32)
        lens[0::2] = (begins - indptr[:-1]) * self._block_size
        lens[1::2] = host.seq_lens - lens[0::2]
        rest = Pages(tensor_over(doubled), tensor_over(last), tensor_over(lens), pages.indices)
        self._rest.plan(rest, 0, 2 * num_rows, tensor_over(queries), metadata.max_query_len)
        return True

    def run(
        self, query: Tensor, caches: Any, *, out: Tensor, return_lse: bool = False, **scales: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends for all tokens of the step; ``out`` is written and returned, with the log-sum-exp to base 2."""
        _, lse = self._rest.run(query, caches, out=out, return_lse=True, **scales)
        if self._tokens is None:
            shared, shared_lse = self._prefix.run(query, caches, return_lse=True, **scales)
            self._merge(out, lse, shared, shared_lse)
        else:
            some = query.index_select(0, self._tokens)
            shared, shared_lse = self._prefix.run(some, caches, return_lse=True, **scales)
            part, part_lse = out.index_select(0, self._tokens), lse.index_select(0, self._tokens)
            self._merge(part, part_lse, shared, shared_lse)
            out.index_copy_(0, self._tokens, part)
            lse.index_copy_(0, self._tokens, part_lse)
        return (out, lse) if return_lse else out

    def _shared(self, metadata: AttentionMetadata) -> SharedPrefix | None:
        """The prefix that the rule accepts; behind the persistent builder block 0 belongs to no request."""
        host = metadata.host
        if metadata.num_reqs < self._rule.min_requests or len(host.query_start_loc) != metadata.num_reqs + 1:
            return None
        table = getattr(host, "block_table", None)
        if metadata.from_groups or table is None:
            return None  # some of its rows have no table; the host has none of a step that an engine's tensors are
        table = table[:, : -(-int(host.seq_lens.max(initial=0)) // self._block_size)]
        return find_shared_prefix(table, host.context_lens, self._block_size, self._rule, null_block=0)

    def _plan_prefix(self, metadata: AttentionMetadata, pages: Pages, shared: SharedPrefix, query_lens: Any) -> None:
        rows = shared.rows
        num_tokens = int(query_lens[rows].sum())
        self._tokens = None
        if len(rows) < metadata.num_reqs:
            starts = metadata.host.query_start_loc
            tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows.tolist()])
            self._tokens = torch.from_numpy(tokens.astype(np.int64)).to(self._device, non_blocking=True)
        begin = int(pages.indptr[int(rows[0])])
        on_host: Any = {"dtype": torch.int32, "device": "cpu"}
        prefix = Pages(
            torch.tensor([begin, begin + shared.num_blocks], **on_host),
            torch.tensor([self._block_size], **on_host),
            torch.tensor([shared.num_tokens], **on_host),
            pages.indices,
        )
        self._prefix.plan(prefix, 0, 1, torch.tensor([0, num_tokens], **on_host), num_tokens)
