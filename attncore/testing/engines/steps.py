"""Metadata for the kit's steps: built on the host by the real doors, put on the backend's device, planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.builder import CommonAttentionMetadata, InputBatch, MetadataBuilder
from attncore.builder.fields import ARRAYS, COUNTS

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

OTHERS = ("moves", "req_ids", "decodes_first", "from_groups", "use_cuda_graph", "max_decode_query_len")


def planned(backend: AttentionBackend, step: Any) -> CommonAttentionMetadata:
    """A host step as the backend gets it: arrays on its device, ``plan`` called. Keeps nothing of the step's memory."""
    host = SimpleNamespace(**{name: np.array(getattr(step.host, name)) for name in ARRAYS if hasattr(step.host, name)})
    values = {name: getattr(step, name) for name in (*COUNTS, *OTHERS) if hasattr(step, name)}
    metadata = CommonAttentionMetadata(host, backend.from_host, **values)
    backend.plan(metadata)
    return metadata


def padded(step: Any, num_reqs: int, num_tokens: int, pad_seq_len: int) -> CommonAttentionMetadata:
    """The step padded as the persistent door pads for a captured graph: ``query_start_loc`` plateaus, slots are -1,
    lengths ``pad_seq_len``, rows of the table 0, page lists empty."""
    rows, tokens = num_reqs - step.num_reqs, num_tokens - step.num_tokens
    fills = {"slot_mapping": -1, "seq_lens": pad_seq_len, "logits_indices": 0}
    host = SimpleNamespace()
    for name in ARRAYS:
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
    values = {name: getattr(step, name) for name in (*COUNTS, *OTHERS) if hasattr(step, name)}
    decode = {"num_decodes": step.num_decodes + rows, "num_decode_tokens": step.num_decode_tokens + tokens}
    counts = {"num_reqs": num_reqs, "num_tokens": num_tokens, **(decode if not step.num_prefills else {})}
    return CommonAttentionMetadata(host, **{**values, **counts})


def prefill_once(backend: AttentionBackend, kv_cache: Any, block_ids: list[int], numbers: Tensor) -> Tensor:
    """One prompt, whose token i has keys and values of ``numbers[i]`` and queries of ones; the output.

    A backend that runs decodes only gets it token by token; the output is then the last token's.
    """
    config = backend.config
    length = len(numbers)
    impl = backend.impl("footprint", scale=config.head_size**-0.5)
    batch = InputBatch(max_num_reqs=1, max_model_len=length, block_size=config.block_size)
    builder = MetadataBuilder(batch, max_num_batched_tokens=length)
    batch.add_request("a", block_ids)
    chunks = [length]
    if config.spec is not None and "prefill" not in config.spec.phases:
        chunks = [1] * length
    start, output = 0, torch.empty(0)
    for chunk in chunks:
        metadata = planned(backend, builder.build({"a": chunk}))
        part = numbers[start : start + chunk].view(-1, 1, 1)
        start += chunk
        sizes = (config.head_size, config.head_size, config.head_size_v or config.head_size)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        dtype = getattr(torch, config.dtype)
        query, key, value = (
            source.expand(chunk, head, size).contiguous().to(config.device, dtype)
            for source, head, size in zip((torch.ones_like(part), part, part), heads, sizes, strict=True)
        )
        output = impl.forward(query, key, None if config.use_mla else value, kv_cache, metadata)
    return output
