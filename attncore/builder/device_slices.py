"""A view of a step on a device: slices of its tensors as a batch of their own, rebased on access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.fields import ARRAYS, DERIVED, FIELDS, Length, Rebase
from attncore.builder.metadata import CommonAttentionMetadata, is_on_device, step_of
from attncore.builder.read_only import read_only
from attncore.builder.slices import rebased
from attncore.errors import AttncoreError


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
        whole._give_states(self, first, last)  # which say whether a row has a state by the view's lengths

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes.
            if name in ARRAYS:
                if name == "span_ends" and getattr(self.host, name) is None:
                    return None
                part = self._derived(name) if name in DERIVED else self._slice(name)
                value = read_only(part) if isinstance(part, np.ndarray) else part
                if self._is_there(name):  # else it may be made of the last step's numbers: a plan has asked
                    self.__dict__[name] = value
                return value
            return super().__getattr__(name)

    def _is_there(self, name: str) -> bool:
        """Whether the device has a field of the step: it was sent, and not without this one."""
        step = step_of(self)
        return is_on_device(step) and name not in getattr(getattr(step, "_side", None), "unsent", ())

    def _slice(self, name: str) -> Any:
        field, whole, host, rows = FIELDS[name], getattr(self._whole, name), self._whole.host, self._rows
        match field.length:
            case Length.PAGE:
                if not self.knows_pages:
                    raise AttncoreError(
                        f"metadata: {name} of a view begin where the device alone knows, for the host has no exact "
                        "lengths of this step; take the whole step's, with its paged_kv_indptr"
                    )
                if (indptr := getattr(host, "paged_kv_indptr", None)) is None:  # the first rows of unknown lengths
                    part = whole[: rows.stop * self._whole.block_table.shape[1]]
                else:
                    part = whole[int(indptr[rows.start]) : int(indptr[rows.stop])]
            case Length.ENCODER_TOKEN:
                starts = host.encoder_query_start_loc
                part = whole[int(starts[rows.start]) : int(starts[rows.stop])]
            case Length.START:
                part = whole[rows.start : rows.stop + 1]
            case Length.TOKEN:
                part = whole[self._tokens]
            case _:
                part = whole[rows]
        if field.rebase is Rebase.FIRST_VALUE and rows.start:
            # Read on the host where it knows, which launches nothing; lengths of an overlapped step are bounds there.
            first = int(getattr(host, name)[rows.start]) if self._exact(name) else part[0]
            return part - first
        if field.rebase is Rebase.FIRST_VALUE:
            return part
        return rebased(part, field.rebase, rows.start, self._tokens.start)

    def _view(
        self, first: int, last: int, start: int, stop: int, *, whole_encoder: bool = False, **counts: int
    ) -> CommonAttentionMetadata:
        # Of the device's tensors again: the host's lengths may be bounds.
        view = super()._view(first, last, start, stop, whole_encoder=whole_encoder, **counts)
        return DeviceView(view, self, first, last, start, stop)

    @property
    def knows_pages(self) -> bool:
        """Whether it is known where the view's page indices begin."""
        if self._rows.start:
            return self._exact("paged_kv_indptr")
        return not isinstance(self._whole, DeviceView) or self._whole.knows_pages

    def _exact(self, name: str) -> bool:
        """Whether the host has a field of starts as the device has it."""
        return name == "query_start_loc" or (
            self._whole.host_lengths == "exact" and getattr(self._whole.host, name, None) is not None
        )
