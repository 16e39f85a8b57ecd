"""Steps of either builder as the backend gets them: padded, copied to its device, planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attncore.builder import CommonAttentionMetadata
from attncore.builder.fields import ARRAYS, COUNTS, DERIVED, FIELDS
from attncore.builder.slices import HostArrays
from attncore.testing.engines.metadata_snapshot import MetadataSnapshot
from attncore.testing.engines.pad_array import pad_array

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, SpecFacts

COPIED = (
    *COUNTS, "moves", "req_ids", "decodes_first", "from_groups", "use_cuda_graph", "max_decode_query_len",
)  # fmt: skip
"""Fields beside the arrays that a copy of a step has."""


def reads_page_lists(spec: SpecFacts | None) -> bool:
    """Whether a backend finds its blocks by page lists; of the list builder's dialects only some have them."""
    return spec is not None and "paged_kv_indices" in {*spec.host_needs, *spec.device_needs}


def planned(backend: AttentionBackend, step: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A copy of a step built on the host: its arrays on the backend's device, ``plan`` called.

    ConformanceError where the plan writes to the step.
    """
    metadata = copied(backend, step)
    plan(backend, metadata)
    return metadata


def copied(backend: AttentionBackend, step: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A copy of a step built on the host, whose arrays go to the backend's device when they are first read."""
    host = HostArrays(
        **{name: np.array(array) for name in ARRAYS - DERIVED if (array := getattr(step.host, name, None)) is not None}
    )
    values = {name: getattr(step, name) for name in COPIED if hasattr(step, name)}
    values["source"] = step.source  # of the list builder: a backend may ask its groups
    return CommonAttentionMetadata(host, backend.from_host, **values)


def plan(backend: AttentionBackend, metadata: CommonAttentionMetadata) -> None:
    """Call ``plan``; ConformanceError where it writes to the step."""
    snapshot = MetadataSnapshot(metadata)
    backend.plan(metadata)
    snapshot.check("plan")


def padded(step: CommonAttentionMetadata, num_reqs: int, num_tokens: int, pad_seq_len: int) -> CommonAttentionMetadata:
    """The step padded as the persistent builder pads for a captured graph: ``query_start_loc`` repeats its last value,
    slots are -1, lengths ``pad_seq_len``, rows of the table 0, page lists empty."""
    rows, tokens = num_reqs - step.num_reqs, num_tokens - step.num_tokens
    host = HostArrays()
    for name in ARRAYS - DERIVED:
        array = getattr(step.host, name, None)
        if array is not None:
            setattr(host, name, pad_array(FIELDS[name], np.array(array), rows, tokens, pad_seq_len))
    values = {name: getattr(step, name) for name in COPIED if hasattr(step, name)}
    decode = {"num_decodes": step.num_decodes + rows, "num_decode_tokens": step.num_decode_tokens + tokens}
    counts = {"num_reqs": num_reqs, "num_tokens": num_tokens, **(decode if not step.num_prefills else {})}
    return CommonAttentionMetadata(host, **{**values, **counts})
