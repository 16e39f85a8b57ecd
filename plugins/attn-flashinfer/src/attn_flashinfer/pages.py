"""A step's page list and lengths as FlashInfer's plans take them: on the host, but for the indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncore import AttentionMetadata

FromHost = Callable[[npt.NDArray[Any]], Tensor]
"""``AttentionBackend.from_host``."""


class Pages(NamedTuple):
    """n requests, padded ones included."""

    indptr: Tensor
    """int32[n + 1] on the host: where a request's pages start among the indices."""
    last_page_len: Tensor
    """int32[n] on the host."""
    seq_lens: Tensor | None
    """int32[n] on the host; None where they are not what the pages hold (windowed decodes of the list builder)."""
    indices: Tensor
    """int32 on the device: block ids, or where they will be once the step has been sent."""

    def rows(self, first: int, last: int) -> Pages:
        """Requests first..last. The indices stay whole: ``indptr`` says where the requests' begin."""
        if first == 0 and last == len(self.last_page_len):
            return self
        seq_lens = None if self.seq_lens is None else self.seq_lens[first:last]
        return Pages(self.indptr[first : last + 1], self.last_page_len[first:last], seq_lens, self.indices)

    def lengths(self, block_size: int) -> npt.NDArray[np.int64]:
        """int64[n]: the keys of each request as kernels count them, from its pages."""
        counts = np.diff(self.indptr.numpy()).astype(np.int64)
        return np.where(counts > 0, (counts - 1) * block_size + self.last_page_len.numpy(), 0)


class _Memory:
    """int32[count] at an address, as NumPy takes memory that may be written to."""

    def __init__(self, address: int, count: int, kept: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (count,), "typestr": "<i4", "data": (address, False)}
        self.kept = kept


def tensor_over(array: npt.NDArray[np.int32]) -> torch.Tensor:
    """A host array int32[n] as a tensor, without a copy. torch warns of read-only ones; a plan only reads."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Memory(_address(array), len(array), array)))


def arena_tensor(array: npt.NDArray[np.int32]) -> torch.Tensor:
    """The same of a step of the persistent builder, whose few addresses later steps have too."""
    return _tensor_at(_address(array), len(array))


@lru_cache(maxsize=512)  # to make one takes 7 us, three times a plan
def _tensor_at(address: int, count: int) -> torch.Tensor:
    """A tensor that does not keep its memory: it is asked for by an array that lies there."""
    return torch.from_numpy(np.asarray(_Memory(address, count, None)))


def _address(array: npt.NDArray[np.int32]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def pages_of(metadata: AttentionMetadata, block_size: int, num_blocks: int, from_host: FromHost) -> Pages:
    """The page list of a step, as its builder made it or, where it made none, from the block table.

    ``num_blocks``, where not 0, are the cache's: ValueError where a step of the list builder names a block beyond them
    (a batch of the persistent builder knows its pool). Nothing on the device is read.
    """
    host = metadata.host
    if metadata.builder is not None:
        indices = metadata.page_buffer
        return Pages(
            arena_tensor(host.paged_kv_indptr),
            arena_tensor(host.paged_kv_last_page_len),
            arena_tensor(host.seq_lens),
            metadata.paged_kv_indices if indices is None else indices,
        )
    if not hasattr(host, "paged_kv_indptr"):
        return _from_table(metadata, block_size, num_blocks, from_host)
    if metadata.from_groups:
        _check_ids(host.paged_kv_indices, num_blocks)
        seq_lens = None
    else:
        seq_lens = tensor_over(host.seq_lens)
    return Pages(
        tensor_over(host.paged_kv_indptr),
        tensor_over(host.paged_kv_last_page_len),
        seq_lens,
        metadata.paged_kv_indices,
    )


def full(num_reqs: int, max_seq_len: int, block_size: int) -> Pages:
    """Host arrays of ``num_reqs`` requests of the largest length, for asking how much memory a captured size needs."""
    pages = -(-max_seq_len // block_size)
    on_host: Any = {"dtype": torch.int32, "device": "cpu"}
    return Pages(
        torch.arange(num_reqs + 1, **on_host) * pages,
        torch.full((num_reqs,), max_seq_len - (pages - 1) * block_size, **on_host),
        torch.full((num_reqs,), max_seq_len, **on_host),
        torch.empty(0, **on_host),
    )


def _from_table(metadata: AttentionMetadata, block_size: int, num_blocks: int, from_host: FromHost) -> Pages:
    """Of a batch of decodes alone, such as the list builder's of several tokens, which have no page lists."""
    host = metadata.host
    if metadata.num_prefills:
        raise ValueError(
            "metadata: prompts without page lists; FlashInfer reads every key from the cache, so build with the layout "
            "flashinfer, or through MetadataBuilder"
        )
    lens, table = np.asarray(host.seq_lens, dtype=np.int32), np.asarray(host.block_table)
    counts = -(-lens // block_size)
    if counts.max(initial=0) > table.shape[1]:
        raise ValueError(
            f"metadata: a table {table.shape[1]} wide, in blocks of {block_size}, for a length of {int(lens.max())}"
        )
    indices = table[np.arange(table.shape[1])[None, :] < counts[:, None]]
    _check_ids(indices, num_blocks)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    last = np.where(counts > 0, lens - (counts - 1) * block_size, 0).astype(np.int32)
    on_device = from_host(np.ascontiguousarray(indices, dtype=np.int32))
    return Pages(tensor_over(indptr), tensor_over(last), tensor_over(lens), on_device)


def check_table(metadata: AttentionMetadata, block_size: int, num_blocks: int) -> None:
    """ValueError where the tables of a step, which the host has, name a block beyond a cache of ``num_blocks``."""
    if (table := getattr(metadata.host, "block_table", None)) is not None:
        _check_ids(table[: metadata.num_reqs, : -(-metadata.max_seq_len // block_size)].ravel(), num_blocks)


def check_cache(metadata: AttentionMetadata, num_blocks: int) -> None:
    """ValueError where a step or its batch names blocks beyond a layer's cache of ``num_blocks``. Of an engine that
    does not know how many it has, tables on the device are not read.
    """
    if metadata.builder is None:
        _check_ids(getattr(metadata.host, "paged_kv_indices", ()), num_blocks)
        return
    pool = pool_of(metadata)
    if pool is None:
        if (table := getattr(metadata.host, "block_table", None)) is not None:
            _check_ids(table[: metadata.num_reqs].ravel(), num_blocks)
    elif pool > num_blocks:
        raise ValueError(f"kv_cache: num_blocks {num_blocks} found; the batch takes ids of {pool}")


def pool_of(metadata: AttentionMetadata) -> int | None:
    """How many blocks the batch of a step of the persistent builder takes ids of, as the kernels count them; None where
    the batch was not told."""
    if metadata.builder is None:
        return None
    group = next(group for group in metadata.builder.batch.groups if group.name == metadata.group)
    return None if group.num_blocks is None else int(group.num_blocks * group.kernel_blocks)


def _check_ids(indices: Any, num_blocks: int) -> None:
    if num_blocks and len(indices) and int(indices.max()) >= num_blocks:
        raise ValueError(f"metadata: block {int(indices.max())} is beyond the cache's num_blocks {num_blocks}")
