"""A step of one rank, in forms that backends run which know nothing of ranks.

A rank keeps some of a request's tokens, so that the queries of a prefill are not aligned with its keys as a causal mask
takes them. ``token_rows``: each token as a decode of its own, which sees the first so many of the rank's keys. Or in
two parts: ``context_step``, whose queries see all the keys that the rank had before, without a mask; and
``new_tokens_step``, the step's own tokens among themselves, which every rank has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.fields import COUNTS
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.slices import HostArrays
from attncore.kernels import codes, host_functions

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor


def token_rows(
    metadata: Any, mine: ContextParallel, from_host: Callable[[npt.NDArray[Any]], Tensor]
) -> CommonAttentionMetadata:
    """``metadata`` of rank ``mine`` with a decode of one token for each of its tokens.

    A token's slot is -1 where another rank keeps it. ``from_host`` is the backend's: it takes host arrays to the
    device.
    """
    host = metadata.host
    count = len(host.positions)
    slots = np.array(host.slot_mapping)
    kept = (slots >= 0).astype(np.int32)
    # A token that is written here is seen, even where the step is wrong and another rank should keep it.
    visible = np.maximum(mine.seq_lens(host.positions + 1), kept)
    rows = np.arange(count + 1, dtype=np.int32)
    fields = HostArrays(
        slot_mapping=slots,
        positions=np.array(host.positions),
        token_to_req_indices=rows[:-1],
        seq_lens=visible,
        context_lens=visible - kept,
        query_lens=np.ones(count, np.int32),
        query_start_loc=rows,
        logits_indices=rows[:-1],
        block_table=host.block_table.take(host.token_to_req_indices, axis=0),
        seq_start_loc=host_functions.build_query_start_loc(visible),
    )
    pages = host_functions.build_page_lists(fields.block_table, visible, mine.block_size)
    fields.paged_kv_indptr, fields.paged_kv_indices, fields.paged_kv_last_page_len = pages
    return _step(fields, from_host, decodes=count, longest=int(visible.max(initial=0)), longest_query=1)


def context_step(
    metadata: Any, mine: ContextParallel, from_host: Callable[[npt.NDArray[Any]], Tensor]
) -> CommonAttentionMetadata:
    """A rank's step for layers of type ``encoder_decoder`` over its own cache: queries see the context, no new token.

    Nothing is written: the step has no encoder tokens, and all slots are -1.
    """
    host = metadata.host
    context_lens = np.array(host.context_lens)
    longest = int(context_lens.max(initial=0))
    columns = -(-longest // mine.block_size)
    none = np.zeros(len(context_lens), np.int32)
    fields = _new_tokens(metadata)
    for name, array in (
        ("encoder_seq_lens", context_lens),
        ("encoder_query_lens", none),
        ("encoder_seq_start_loc", host_functions.build_query_start_loc(context_lens)),
        ("encoder_query_start_loc", np.zeros(len(none) + 1, np.int32)),
        ("cross_slot_mapping", np.zeros(0, np.int64)),
        ("cross_block_table", np.ascontiguousarray(host.block_table[: len(none), :columns])),
    ):
        setattr(fields, name, array)
    return _step(fields, from_host, longest_query=metadata.max_query_len, max_encoder_seq_len=longest)


def new_tokens_step(metadata: Any, from_host: Callable[[npt.NDArray[Any]], Tensor]) -> CommonAttentionMetadata:
    """The tokens of a rank's step as prompts without context: slots of -1 and no table, as in a profiling run."""
    step = _step(_new_tokens(metadata), from_host, longest_query=metadata.max_query_len)
    step.from_groups = True  # backends handle a prompt without a table by the list builder's rules
    return step


def _new_tokens(metadata: Any) -> HostArrays:
    host = metadata.host
    query_lens, starts = np.array(host.query_lens), np.array(host.query_start_loc)
    none = np.zeros(len(query_lens), np.int32)
    return HostArrays(
        slot_mapping=np.full(len(host.positions), codes.PAD_SLOT_ID, np.int64),
        positions=host_functions.build_positions(none, query_lens)[0],
        token_to_req_indices=np.array(host.token_to_req_indices),
        seq_lens=query_lens,
        context_lens=none,
        query_lens=query_lens.copy(),
        query_start_loc=starts,
        seq_start_loc=starts.copy(),
        logits_indices=np.array(host.logits_indices),
        block_table=np.zeros((len(none), 0), np.int32),
    )


def _step(
    fields: HostArrays,
    from_host: Callable[[npt.NDArray[Any]], Tensor],
    *,
    decodes: int = 0,
    longest: int | None = None,
    longest_query: int,
    **counts: int,
) -> CommonAttentionMetadata:
    """Metadata of rows that are all decodes, or all prefills no longer than their queries."""
    rows, tokens = len(fields.query_lens), len(fields.positions)
    of_decodes, of_prefills = (rows, 0) if decodes else (0, rows)
    longest = longest_query if longest is None else longest
    given = dict.fromkeys(COUNTS, 0) | {
        "num_reqs": rows, "num_tokens": tokens, "max_query_len": longest_query, "max_seq_len": longest,
        "num_decodes": of_decodes, "num_decode_tokens": tokens if decodes else 0, "max_decode_query_len": 1,
        "max_decode_seq_len": longest if decodes else 0, "num_prefills": of_prefills,
        "num_prefill_tokens": 0 if decodes else tokens, "max_prefill_seq_len": 0 if decodes else longest,
        "use_cuda_graph": False,
    }  # fmt: skip
    return CommonAttentionMetadata(fields, from_host, **given | counts)
