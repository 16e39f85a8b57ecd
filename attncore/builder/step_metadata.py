"""The persistent door's metadata: one object an arena, whose counts are the arena's and whose views are made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore.builder.metadata import (
    ARRAY_FIELDS,
    LOC_FIELDS,
    TOKEN_FIELDS,
    CommonAttentionMetadata,
    Wrap,
)
from attncore.errors import AttncoreError

if TYPE_CHECKING:
    from attncore.builder.input_batch import InputBatch


def _count(name: str) -> Any:
    return property(lambda self: getattr(self._arena, name))


class _HostFields:
    """NumPy views of an arena, sized to its step: made on first use, forgotten when a step has another size."""

    def __init__(self, arena: Any, fields: dict[str, npt.NDArray[Any]], batch: InputBatch) -> None:
        self._arena, self._fields, self._batch = arena, fields, batch

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name not in ARRAY_FIELDS:
            raise AttributeError(f"metadata.host has no field {name!r}")
        arena = self._arena
        if name == "block_table":
            view: npt.NDArray[Any] = self._batch.block_table[: arena.num_reqs]
        elif name in TOKEN_FIELDS:
            view = self._fields[name][: arena.num_tokens]
        else:
            view = self._fields[name][: arena.num_reqs + (1 if name in LOC_FIELDS else 0)]
        self.__dict__[name] = view
        return view

    @property
    def paged_kv_indices(self) -> npt.NDArray[np.int32]:
        """Gathered from the live table when asked for: a step that needs none pays nothing."""
        if self._arena.changes != self._batch._rows.changes:
            raise AttncoreError(
                "paged_kv_indices: blocks have moved or left since this step was built; ask for them before the batch "
                "changes"
            )
        return self._batch._page_indices(self.paged_kv_indptr)

    def forget(self) -> None:
        for name in ARRAY_FIELDS & self.__dict__.keys():
            del self.__dict__[name]


class StepMetadata(CommonAttentionMetadata):
    """Valid until its arena is used again, ``depth`` builds later, and not to be written to.

    ``block_table`` is the live table: it, and what is gathered from it (``paged_kv_indices``, the views' tables), is
    this step's until a request leaves, is preempted or truncated, or a build moves rows. Ask for page indices before
    that; afterwards asking raises.
    """

    decodes_first = True
    use_cuda_graph = False
    max_decode_query_len = 1
    num_reqs = _count("num_reqs")
    num_tokens = _count("num_tokens")
    num_decodes = _count("num_decodes")
    num_decode_tokens = _count("num_decodes")
    num_prefills = _count("num_prefills")
    num_prefill_tokens = _count("num_prefill_tokens")
    max_query_len = _count("max_query_len")
    max_seq_len = _count("max_seq_len")
    max_prefill_seq_len = _count("max_prefill_seq_len")
    max_decode_seq_len = _count("max_decode_seq_len")
    step = _count("step")
    req_ids = _count("req_ids")
    moves = _count("moves")

    def __init__(self, arena: Any, fields: dict[str, npt.NDArray[Any]], batch: InputBatch, wrap: Wrap) -> None:
        super().__init__(_HostFields(arena, fields, batch), wrap)
        self._arena, self._fields = arena, fields

    @property
    def paged_kv_indices(self) -> Any:
        return self._this_step("_indices", lambda: self._wrap(self.host.paged_kv_indices))

    def forget_views(self) -> None:
        """Called by the kernel when this arena's step has another number of tokens or requests than its last."""
        self.host.forget()
        for name in ARRAY_FIELDS & self.__dict__.keys():
            del self.__dict__[name]

    def _cached(self, key: str, make: Any) -> Any:
        return self._this_step(key, make)

    def _this_step(self, key: str, make: Any) -> Any:
        step, value = self.__dict__.get(key, (None, None))
        if step != self._arena.step:
            value = make()
            self.__dict__[key] = self._arena.step, value
        return value

    def _prefill_view(self) -> CommonAttentionMetadata | None:
        view = super()._prefill_view()
        if view is not None:  # the kernel wrote the rebased sums in the same pass
            size = self.num_prefills + 1
            view.host.query_start_loc = self._fields["prefill_query_start_loc"][:size]
            view.host.seq_start_loc = self._fields["prefill_seq_start_loc"][:size]
        return view
