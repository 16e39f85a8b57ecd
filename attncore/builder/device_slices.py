"""A view of a step on a device: slices of its tensors as a batch of their own, rebased on access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.fields import ARRAYS, DERIVED, FIELDS, Length, Rebase
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.read_only import read_only
from attncore.builder.slices import rebased


class DeviceView(CommonAttentionMetadata):
    """Rows first:last and tokens start:stop of ``whole``, with the host arrays and counts of ``view``."""

    def __init__(
        self,
        view: CommonAttentionMetadata,
        whole: CommonAttentionMetadata,
        first: int,
        last: int,
        start: int,
        stop: int,
    ) -> None:
        values = dict(vars(view))
        super().__init__(values.pop("host"), values.pop("_wrap"), **values)
        self._whole, self._rows, self._tokens = whole, slice(first, last), slice(start, stop)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes.
            if name in ARRAYS and name not in DERIVED:
                part = self._slice(name)
                value = self.__dict__[name] = read_only(part) if isinstance(part, np.ndarray) else part
                return value
            return super().__getattr__(name)

    def _slice(self, name: str) -> Any:
        field, whole, host, rows = FIELDS[name], getattr(self._whole, name), self._whole.host, self._rows
        match field.length:
            case Length.PAGE:
                part = whole[int(host.paged_kv_indptr[rows.start]) : int(host.paged_kv_indptr[rows.stop])]
            case Length.ENCODER_TOKEN:
                starts = host.encoder_query_start_loc
                part = whole[int(starts[rows.start]) : int(starts[rows.stop])]
            case Length.START:
                part = whole[rows.start : rows.stop + 1]
            case Length.TOKEN:
                part = whole[self._tokens]
            case _:
                part = whole[rows]
        if field.rebase is Rebase.FIRST_VALUE:
            first = int(getattr(host, name)[rows.start])  # read on the host, which needs no synchronisation
            return part - first if first else part
        return rebased(part, field.rebase, rows.start, self._tokens.start)
