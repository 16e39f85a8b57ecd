"""Steps of either builder as the backend gets them: padded, copied to its device, planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from attncore.builder import CommonAttentionMetadata
from attncore.builder.metadata import ARRAY_FIELDS, COUNT_FIELDS

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

COPIED = (
    *COUNT_FIELDS, "moves", "req_ids", "decodes_first", "from_groups", "use_cuda_graph", "max_decode_query_len",
)  # fmt: skip
"""Fields beside the arrays that a copy of a step has."""


def planned(backend: AttentionBackend, step: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A copy of a step built on the host: its arrays on the backend's device, ``plan`` called."""
    host = SimpleNamespace(
        **{name: np.array(getattr(step.host, name)) for name in ARRAY_FIELDS if hasattr(step.host, name)}
    )
    values = {name: getattr(step, name) for name in COPIED if hasattr(step, name)}
    metadata = CommonAttentionMetadata(host, backend.from_host, **values)
    backend.plan(metadata)
    return metadata


def padded(step: CommonAttentionMetadata, num_reqs: int, num_tokens: int, pad_seq_len: int) -> CommonAttentionMetadata:
    """The step padded as the persistent builder pads for a captured graph: ``query_start_loc`` repeats its last value,
    slots are -1, lengths ``pad_seq_len``, rows of the table 0, page lists empty."""
    rows, tokens = num_reqs - step.num_reqs, num_tokens - step.num_tokens
    fills = {"slot_mapping": -1, "seq_lens": pad_seq_len, "logits_indices": 0}
    host = SimpleNamespace()
    for name in ARRAY_FIELDS:
        if not hasattr(step.host, name):
            continue
        array = np.array(getattr(step.host, name))
        if name in ("slot_mapping", "positions", "token_to_req_indices"):
            array = np.concatenate((array, np.full(tokens, fills.get(name, 0), array.dtype)))
        elif name == "block_table":
            array = np.concatenate((array, np.zeros((rows, array.shape[1]), array.dtype)))
        elif name == "seq_start_loc":
            array = np.concatenate((array, array[-1] + pad_seq_len * np.arange(1, rows + 1, dtype=array.dtype)))
        elif name in ("query_start_loc", "paged_kv_indptr"):
            array = np.concatenate((array, np.full(rows, array[-1])))
        elif name != "paged_kv_indices":
            array = np.concatenate((array, np.full(rows, fills.get(name, 0), array.dtype)))
        setattr(host, name, array.astype(getattr(step.host, name).dtype))
    values = {name: getattr(step, name) for name in COPIED if hasattr(step, name)}
    decode = {"num_decodes": step.num_decodes + rows, "num_decode_tokens": step.num_decode_tokens + tokens}
    counts = {"num_reqs": num_reqs, "num_tokens": num_tokens, **(decode if not step.num_prefills else {})}
    return CommonAttentionMetadata(host, **{**values, **counts})
