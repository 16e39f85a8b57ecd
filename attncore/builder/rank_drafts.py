"""Drafts on a rank of decode context parallelism, which no backend is handed.

A kernel hides from each query of a row as many of the last keys as queries follow it. Of the keys that one rank keeps
those are others: a draft that another rank keeps hides nothing here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.show import counted

INSTEAD = (
    "a backend hides the last keys of a row from its first queries, and on a rank those are not the drafts'; hand it "
    "each token as a row of its own, whose length is ContextParallel.seq_lens(positions + 1)"
)


def refuse_rank_drafts(metadata: Any, backend: Any) -> None:
    """ValueError where ``metadata`` is one rank's step with decodes of several tokens, and the backend has a spec.

    A row is a rank's where some of its tokens have no slot, and its length counts the others alone. Steps whose host
    arrays do not say so pass.
    """
    host, longest = metadata.host, getattr(metadata, "max_decode_query_len", 1)
    if backend.spec is None or longest <= 1 or not metadata.num_decodes:
        return
    arrays = [getattr(host, name, None) for name in ("slot_mapping", "query_start_loc", "seq_lens", "context_lens")]
    if any(array is None for array in arrays):
        return
    slots, bounds, lengths, contexts = map(np.asarray, arrays)
    rows = min(len(lengths), len(contexts), len(bounds) - 1)
    starts, ends = bounds[:rows], bounds[1 : rows + 1]
    if not rows or ends[-1] > len(slots):
        return
    sums = np.concatenate(([0], np.cumsum(slots >= 0)))
    kept, tokens = sums[ends] - sums[starts], ends - starts
    shared = (kept < tokens) & (lengths[:rows] - contexts[:rows] == kept)
    wrong = np.flatnonzero(shared & (tokens > 1) & (tokens <= longest))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"metadata: row {row} has {counted(int(tokens[row]), 'query token')}, of which this rank "
            f"keeps {kept[row]}; {INSTEAD}"
        )
