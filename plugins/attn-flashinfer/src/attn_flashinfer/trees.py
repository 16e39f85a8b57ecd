"""Draft trees as FlashInfer takes them: a packed mask of each request, over all of its keys.

A request's mask is a bit for each query and key, rows of queries one behind the other, from the least bit of a byte
on; it begins at a byte of its own. Kernels read no bit of a query or key that the request has not, so none behind it.

Of these bits hardly any is 0: a tree's tokens see the whole context. So the host finds the bytes that are not 255, by
arithmetic over the tokens of the step (a few for each token, whatever the context), and the device, which has the
memory, fills the mask with ones and puts them in: two launches, and one copy of some kilobytes. A whole mask of 64
requests of 8 tokens at 8,192 keys would be half a megabyte to make on the host and to send.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncore import AttentionMetadata

MOST_BYTES = (1 << 31) - 1
"""Of a step's masks: offsets are int32."""

MOST_TOKENS = 64
"""Of a tree: the bits of a mask. Rows of more are chains."""

_ONES = np.array([(1 << count) - 1 for count in range(65)], np.uint64)
"""Words whose first bits are 1, by their number."""

Masks = npt.NDArray[np.int64]
"""``tree_mask`` of some tokens."""


class PackedMask(NamedTuple):
    """A packed mask by the bytes that are not 255."""

    indptr: npt.NDArray[np.int64]
    """int64[n + 1]: the byte where each request's mask begins, and the end."""
    places: npt.NDArray[np.int64]
    """Bytes with a 0, ascending."""
    values: npt.NDArray[np.uint8]
    """What these bytes are."""


def has_masks(metadata: AttentionMetadata) -> bool:
    """Whether the step is of a builder with ``draft_trees``."""
    return hasattr(metadata.host, "tree_mask")


def trees_of(metadata: AttentionMetadata, first: int, last: int) -> Masks | None:
    """``tree_mask`` of the tokens first..last of a step; None where none of them is in a tree."""
    masks = getattr(metadata.host, "tree_mask", None)
    if masks is None:
        return None
    some: Masks = masks[first:last]
    return some if some.any() else None


def holds_trees(metadata: AttentionMetadata) -> bool:
    """Whether a token of the step is in a draft tree."""
    return trees_of(metadata, 0, metadata.num_tokens) is not None


def lag_of(masks: Masks, starts: npt.NDArray[Any]) -> int:
    """How many positions the tokens of a step stand at most before their index: siblings have one together."""
    index = np.arange(len(masks)) - np.repeat(starts[:-1], np.diff(starts))
    return int(np.where(masks != 0, index + 1 - _number(masks), 0).max(initial=0))


def packed_mask(
    masks: Masks, starts: npt.NDArray[Any], lengths: npt.NDArray[Any], window: int | None, lag: int = 0
) -> PackedMask:
    """The mask of requests whose queries begin at ``starts`` [n + 1], the first at 0, and that have ``lengths`` keys.

    Kernels with a window go by index, and hide what lies ``window + lag`` tokens before a query or further; the mask
    hides the rest by depth. Tokens in no tree see all before them. ValueError where it would be too long.
    """
    counts = np.diff(starts).astype(np.int64)
    sizes = counts * lengths
    indptr = np.concatenate(([0], np.cumsum((sizes + 7) // 8)))
    if indptr[-1] > MOST_BYTES:
        raise ValueError(
            f"metadata: the masks of draft trees take {indptr[-1]} bytes, and FlashInfer takes {MOST_BYTES}; run fewer "
            "requests with trees in a step"
        )
    rows = np.repeat(np.arange(len(counts)), counts)
    keys, contexts = np.asarray(lengths, np.int64)[rows], (lengths - counts)[rows]
    index = np.arange(len(rows)) - np.asarray(starts, np.int64)[rows]
    own_keys = np.where(keys > 0, counts[rows], 0)  # rows of padding have none
    in_tree = masks != 0
    number = np.where(in_tree, _number(masks), index + 1)  # depth and 1
    # Of each token runs of 64 bits, 1 where a key is hidden: one of its context, and of the step's tokens one, or more
    # beside chains that are longer than any tree.
    firsts = 64 * np.arange(-(-int(counts.max(initial=1)) // 64))
    own = _run(index[:, None] + 1 - firsts, own_keys[:, None] - firsts)
    own[in_tree] = 0
    own[in_tree, 0] = _ONES[own_keys[in_tree]] & ~masks[in_tree].view(np.uint64)
    begin, context = contexts, np.zeros(len(rows), np.uint64)
    if window is not None:
        begin = np.maximum(contexts + index - (window - 1) - lag, 0)
        context = _run(np.int64(0), np.minimum(contexts, contexts + number - window) - begin)
        if int(number.max(initial=0)) > window:
            own |= _passed(masks, index, number, window, firsts)
            own[own_keys == 0] = 0
    row = 8 * indptr[rows] + index * keys
    bits = np.concatenate(((row + begin)[:, None], (row + contexts)[:, None] + firsts), axis=1)
    return PackedMask(indptr, *_without(np.concatenate((context[:, None], own), axis=1), bits))


def _run(first: Any, last: Any) -> npt.NDArray[np.uint64]:
    """Words whose bits first..last are 1; of places beyond 0 and 64 what lies between these."""
    return _ones(last) & ~_ones(first)


def _ones(count: Any) -> npt.NDArray[np.uint64]:
    ones: npt.NDArray[np.uint64] = _ONES[np.minimum(np.maximum(count, 0), 64)]
    return ones


def _passed(
    masks: Masks,
    index: npt.NDArray[np.int64],
    number: npt.NDArray[np.int64],
    window: int,
    firsts: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint64]:
    """Words of the step's tokens that lie ``window`` or more before each: of chains by index, of trees by depth."""
    found = _run(np.int64(0), index[:, None] - window + 1 - firsts)
    in_tree = masks != 0
    bits = _bits(masks[in_tree])
    passed = bits & (number[in_tree, None] - np.cumsum(bits, axis=1) >= window)
    found[in_tree] = 0
    found[in_tree, 0] = np.packbits(passed.astype(np.uint8), axis=1, bitorder="little").view("<u8").ravel()
    return found


def _without(
    hidden: npt.NDArray[np.uint64], bits: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Bytes of ones without the ``hidden`` bits of words that begin at ``bits``: those that are not 255, and where."""
    some = np.flatnonzero(hidden)
    words, first = hidden.ravel()[some], bits.ravel()[some]
    shift = (first & 7).astype(np.uint64)
    width = (int(words.max(initial=1)).bit_length() + 14) // 8  # bytes that a shifted word reaches
    zeros = (words << shift).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    if width > 8:
        zeros = np.column_stack((zeros, ((words >> (np.uint64(63) - shift)) >> np.uint64(1)).astype(np.uint8)))
    chosen = np.flatnonzero(zeros)
    places = ((first >> 3)[:, None] + np.arange(width)).ravel()[chosen]  # ascending, as tokens and their words are
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    marks = zeros.ravel()[chosen]
    return places[begins], 255 - (np.bitwise_or.reduceat(marks, begins) if len(marks) else marks)


class MaskMemory:
    """``buffer``, uint8 on the device, that holds a packed mask: of ``nbytes`` that stay, or as large as is needed."""

    def __init__(self, device: str, nbytes: int | None = None) -> None:
        self._device, self._stays = device, nbytes is not None
        self.buffer = self._taken(nbytes or 0)

    def put(self, mask: PackedMask) -> tuple[Tensor, Tensor]:
        """Writes a mask; its bytes uint8, and int64[n + 1], where each request's begin."""
        size, count = int(mask.indptr[-1]), len(mask.places)
        if size > len(self.buffer):
            if self._stays:
                raise ValueError(
                    f"metadata: the masks of draft trees take {size} bytes, and the captured size has "
                    f"{len(self.buffer)}; a request is longer than the batch's max_model_len"
                )
            self.buffer = self._taken(-(-size // 4096) * 4096)
        sent = _sent(np.concatenate((mask.indptr, mask.places, mask.values)), self._device)
        packed = self.buffer[:size].fill_(255)
        if count:
            packed.scatter_(0, sent[-2 * count : -count], sent[-count:].to(torch.uint8))
        return packed, sent[: len(mask.indptr)]

    def _taken(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # a step outside of it may write what one within it has taken
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def point_at(wrapper: Any, places: Tensor) -> None:
    """Has a wrapper's kernels read each request's mask at ``places`` int32[n + 1], of its plan of an eager step.

    A plan that is given packed masks computes their places from lengths in bits, as if these were bytes (FlashInfer
    0.7.2; flashinfer-ai/flashinfer#2201), and has no parameter for them. RuntimeError where it holds them elsewhere.
    """
    if not isinstance(getattr(wrapper, "_mask_indptr_buf", None), Tensor):
        raise RuntimeError(
            f"flashinfer: {type(wrapper).__name__} has no _mask_indptr_buf, where FlashInfer 0.7.2 keeps the places of "
            "masks; draft trees need that version, all other steps run"
        )
    wrapper._mask_indptr_buf = places


def _sent(array: npt.NDArray[np.int64], device: str) -> Tensor:
    """An array on the device; from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else tensor


def _bits(masks: Masks) -> npt.NDArray[np.uint8]:
    """The bits of each mask, 0 or 1 [n, 64], the least first."""
    return np.unpackbits(masks.astype("<i8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")


def _number(masks: Masks) -> npt.NDArray[np.int64]:
    """How many bits of each mask are 1."""
    counts: npt.NDArray[np.int64]
    if hasattr(np, "bitwise_count"):  # of numpy 2
        counts = np.bitwise_count(masks.view(np.uint64)).astype(np.int64)
    else:
        counts = _bits(masks).sum(axis=1, dtype=np.int64)
    return counts
