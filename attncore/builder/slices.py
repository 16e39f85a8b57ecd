"""Slices of a step's host arrays as a batch of their own, rebased as ``fields.FIELDS`` declares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from attncore.builder.fields import ENCODER_ARRAYS, FIELDS, Length, Rebase

_WITH_ENCODER = tuple(
    (name, field.length, field.rebase, name in ENCODER_ARRAYS)
    for name, field in FIELDS.items()
    if field.length is not Length.PAGE and not field.internal and field.derive is None
)
_WITHOUT_ENCODER = tuple(sliced for sliced in _WITH_ENCODER if sliced[0] not in ENCODER_ARRAYS)


class HostArrays(SimpleNamespace):
    """Host arrays by name. The page indices of a view are cut out on access: gathering them is slow, and few views
    need them.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "paged_kv_indices" and "pages_of_whole" in self.__dict__:
            whole, start, stop = self.pages_of_whole
            self.paged_kv_indices = whole.paged_kv_indices[start:stop]
            return self.paged_kv_indices
        field = FIELDS.get(name)
        if field is not None and field.derive is not None:
            return field.derive(self)  # not kept: the arrays may be those of another step the next time
        raise AttributeError(f"metadata.host has no field {name!r}")


def slice_host(
    whole: Any, first: int, last: int, start: int, stop: int, whole_encoder: bool = False
) -> tuple[HostArrays, dict[str, int]]:
    """Rows first:last and tokens start:stop of a step's host arrays, and the counts of its encoder tokens.

    ``whole_encoder``: the encoder's arrays cover all rows, as in views of the first generation.
    """
    host = HostArrays()
    for name, length, rebase, of_encoder in _WITH_ENCODER if hasattr(whole, "encoder_seq_lens") else _WITHOUT_ENCODER:
        array = getattr(whole, name, None)
        if array is None:  # a cross group has no slot_mapping
            continue
        rows = (0, len(whole.encoder_seq_lens)) if of_encoder and whole_encoder else (first, last)
        setattr(host, name, rebased(_cut(array, length, rows, (start, stop), whole), rebase, rows[0], start))
    if hasattr(whole, "paged_kv_indptr"):
        host.pages_of_whole = whole, whole.paged_kv_indptr[first], whole.paged_kv_indptr[last]
    return host, _encoder_counts(host, whole, 0 if whole_encoder else first)


def rebased(part: Any, rebase: Rebase, first_row: int, first_token: int) -> Any:
    """A slice (NumPy array or tensor), rebased to count from its own start."""
    match rebase:
        case Rebase.FIRST_ROW if first_row:
            return part - np.int32(first_row) if isinstance(part, np.ndarray) else part - first_row
        case Rebase.FIRST_TOKEN if first_token:
            return part - np.int32(first_token) if isinstance(part, np.ndarray) else part - first_token
        case Rebase.FIRST_VALUE if part[0]:
            return part - part[0]
    return part


def _cut(array: Any, length: Length, rows: tuple[int, int], tokens: tuple[int, int], whole: Any) -> Any:
    first, last = rows
    match length:
        case Length.TOKEN:
            return array[tokens[0] : tokens[1]]
        case Length.START:  # those of the list builder end before padded rows
            return array[min(first, len(array) - 1) : last + 1]
        case Length.ENCODER_TOKEN:
            starts = whole.encoder_query_start_loc
            return array[starts[first] : starts[last]]
    return array[first:last]


def _encoder_counts(host: Any, whole: Any, first: int) -> dict[str, int]:
    if not hasattr(host, "encoder_seq_lens"):
        return {}
    lens = host.encoder_seq_lens
    unpadded = lens[: max(0, len(whole.query_lens) - first)]  # the list builder pads lengths with 1
    return {"num_encoder_tokens": int(unpadded.sum()), "max_encoder_seq_len": int(lens.max(initial=0))}
