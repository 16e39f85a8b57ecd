"""The cache of a profiling run: the step's own keys and values, paged, for as long as one layer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attn_flashinfer.pages import Pages, tensor_over
from attncore import AttentionMetadata, CacheWriter

if TYPE_CHECKING:
    from attn_flashinfer.backend import FlashInferBackend


def is_profiled(metadata: AttentionMetadata) -> bool:
    """Whether it is a step that can run without a cache: it has tokens, and no request has a context, or none has a
    page of it. (A rank that keeps no key of any request has no page either; its lengths are those of what it keeps.)
    """
    host = metadata.host
    starts, lens = host.query_start_loc, host.seq_lens
    if not starts[-1] or len(lens) != len(starts) - 1:
        return False
    counts, indptr = np.diff(starts), getattr(host, "paged_kv_indptr", None)
    return bool((counts == lens if indptr is None or indptr[-1] else counts <= lens).all())


def has_no_pages(metadata: AttentionMetadata) -> bool:
    """Whether a step's tokens attend to its own keys alone, wherever a cache is: profiling runs, and the new tokens
    beside chunks of a context. Their page lists are empty.
    """
    if metadata.builder is not None or metadata.use_cuda_graph:
        return False
    indptr = getattr(metadata.host, "paged_kv_indptr", None)
    return indptr is not None and not indptr[-1] and is_profiled(metadata)


class ProfiledStep(NamedTuple):
    """Prompts without a context, in a cache that holds nothing else."""

    pages: Pages
    starts: Tensor
    """int32[n + 1] on the host: where each request's tokens start."""
    keys: Tensor
    values: Tensor
    """Views [blocks, block_size, num_kv_heads, head_size] on the device."""


def profiled_step(
    backend: FlashInferBackend,
    writer: CacheWriter,
    key: Any,
    value: Tensor | None,
    metadata: AttentionMetadata,
) -> ProfiledStep:
    """A cache with the keys and values of a step whose requests have no context."""
    starts, block_size = metadata.host.query_start_loc, backend.shape.block_size
    lens = np.diff(starts).astype(np.int32)
    counts = -(-lens // block_size)
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    num_pages = int(indptr[-1])
    first = indptr[:-1].astype(np.int64) * block_size - starts[:-1]  # less the tokens of the requests before
    slots = np.repeat(first, lens) + np.arange(int(starts[-1]))
    keys, values = backend.kv_cache_views(
        torch.zeros(
            backend.kv_cache_shape(num_pages, block_size, backend.shape.num_kv_heads, backend.shape.head_size),
            dtype=backend.shape.cache_dtype, device=backend.config.device,
        )
    )  # fmt: skip
    new = key[: len(slots)]
    if backend.config.use_mla:
        writer(new, new, keys, keys, backend.from_host(slots))  # rows whole: the values are a part of them
    else:
        given: Any = value if value is None else value[: len(slots)]  # None is refused by the writer
        writer(new, given, keys, values, backend.from_host(slots))
    pages = Pages(
        torch.from_numpy(indptr),
        torch.from_numpy(np.where(counts > 0, lens - (counts - 1) * block_size, 0).astype(np.int32)),
        torch.from_numpy(lens),
        backend.from_host(np.arange(num_pages, dtype=np.int32)),
    )
    return ProfiledStep(pages, tensor_over(starts), keys, values)
