"""What advance_step writes: the arrays of the next step, and how they become again what they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore.array_arguments import Int32Array
from attncore.builder.fields import ARRAYS
from attncore.builder.lists.next_decodes import Next
from attncore.builder.lists.unfinished import Before
from attncore.builder.metadata import OF_ARRAYS, CommonAttentionMetadata
from attncore.builder.slices import own_arrays, set_own_array

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings

# The host arrays that change.
_FIELDS = (
    "context_lens", "positions", "slot_mapping", "seq_lens", "seq_start_loc", "block_table", "paged_kv_indptr",
    "paged_kv_indices", "paged_kv_last_page_len",
)  # fmt: skip


_WRITTEN = tuple(name for name in _FIELDS if name not in ("block_table", "paged_kv_indices"))
"""Those that keep their memory. Of a table some rows change, or it is replaced; page indices are replaced."""


def write_next(metadata: CommonAttentionMetadata, step: Next, settings: ListSettings) -> None:
    """Makes the step the next one; an exception in the middle leaves what ``BeforeNext`` takes back."""
    host, (rows, ids) = metadata.host, step.started
    own = own_arrays(host)
    n, num_reqs = len(own.query_lens), metadata.num_reqs
    own.context_lens += 1
    own.positions[:n] += 1
    own.slot_mapping[:n] += 1
    own.slot_mapping[rows] = ids.astype(np.int64) * settings.block_size
    if step.seq_lens is None:
        own.seq_lens[:n] += 1
    else:
        own.seq_lens[:n] = step.seq_lens
    np.cumsum(own.seq_lens, out=own.seq_start_loc[1:])
    table, changed = own.block_table, step.table
    if changed.ids.shape[1] != table.shape[1]:
        set_own_array(host, "block_table", np.zeros((num_reqs, changed.ids.shape[1]), np.int32))
        own.block_table[:, : table.shape[1]] = table[:, : changed.ids.shape[1]]
    if len(changed.rows):
        own.block_table[changed.rows] = changed.ids
    if settings.dialect.page_lists:
        own.paged_kv_last_page_len[:n] += 1
        own.paged_kv_last_page_len[rows] = 1
        if len(rows):
            _add_pages(host, settings, rows, ids)
    metadata.max_seq_len = metadata.max_decode_seq_len = step.max_seq_len
    metadata.advanced += 1
    metadata.step = settings.last_step + 1
    vars(metadata)["_table_lens"] = step.table_lens
    unwindowed = settings.block_size if step.seq_lens is None and not len(changed.rows) else None
    _update_views(vars(metadata), table_changed=len(changed.rows) > 0, advanced=unwindowed, pages_changed=len(rows) > 0)


def _add_pages(host: Any, settings: ListSettings, rows: npt.NDArray[np.intp], ids: Int32Array) -> None:
    """Appends a page to the page lists of ``rows``, which ``plan_next`` has checked."""
    own = own_arrays(host)
    indptr = own.paged_kv_indptr
    before, more = indptr[rows + 1], np.zeros(len(indptr), np.int32)
    more[rows + 1] = 1
    indptr += np.cumsum(more, dtype=np.int32)
    if settings.sliding_window is not None:  # the window trims the table, but not the page list
        set_own_array(host, "paged_kv_indices", np.insert(own.paged_kv_indices, before, ids))
        return
    indices = np.empty(int(indptr[-1]), np.int32)
    n = len(own.query_lens)
    row = settings.kernels.fill_page_indices(own.block_table[:n], indptr[: n + 1], indices)
    if row >= 0:
        raise ValueError(f"metadata: row {row} has more pages than its table has blocks; build the step anew")
    set_own_array(host, "paged_kv_indices", indices)


def _update_views(
    held: dict[str, Any], table_changed: bool, advanced: int | None = None, pages_changed: bool = True
) -> None:
    """Updates what was made of the host arrays: copies to tensors at the same addresses, and drops views.

    ``advanced``: the block size where the device can move its fields on by itself, from whole tables that it has; then
    one kernel takes the place of the copies.
    """
    host = own_arrays(held["host"])
    for name in ("_prefill", "_decode", *OF_ARRAYS):
        held.pop(name, None)
    for name in ARRAYS & held.keys():
        if isinstance(held[name], np.ndarray):  # a caller may have set its shape or dtype in place
            del held[name]
    moved = frozenset() if advanced is None else _advance_on_device(held, advanced)
    for name in _FIELDS:
        value = held.get(name)
        if value is None or name in moved or (name == "block_table" and not table_changed):
            continue
        if name == "paged_kv_indptr" and not pages_changed:
            continue
        array = getattr(host, name)
        if tuple(value.shape) != array.shape:
            del held[name]
        elif value.data_ptr() != array.__array_interface__["data"][0]:
            import torch

            # Memory that is not pinned was staged when this returns, so it may be written to again.
            value.copy_(torch.from_numpy(array), non_blocking=True)


def _advance_on_device(held: dict[str, Any], block_size: int) -> frozenset[str]:
    """Moves the fields that lie on a GPU on by one kernel; their names, none where it cannot run."""
    lens, table = held.get("seq_lens"), held.get("block_table")
    if lens is None or table is None or not runs_kernels(lens):
        return frozenset()
    try:
        from attncore.builder.lists import triton_advance
    except ImportError:  # no triton
        return frozenset()
    names = ("seq_lens", "block_table", *triton_advance.FIELDS)
    tensors = {name: held[name] for name in names if name in held}
    host = own_arrays(held["host"])
    for name, tensor in tensors.items():
        same_kind = tensor.device == lens.device and tensor.is_contiguous()
        if not same_kind or tuple(tensor.shape) != getattr(host, name).shape:  # an engine's own
            return frozenset()
    triton_advance.advance_rows(tensors, block_size, len(host.query_lens), held["num_reqs"])
    return frozenset(tensors)


def runs_kernels(tensor: Any) -> bool:
    """Whether Triton launches kernels where ``tensor`` lies."""
    return bool(getattr(tensor, "is_cuda", False))


class BeforeNext(Before):
    """What a step was before ``write_next``, which writes to arrays that the step keeps."""

    def __init__(self, metadata: CommonAttentionMetadata, step: Next, tokens: Any) -> None:
        own = own_arrays(metadata.host)
        attributes = {
            "max_seq_len": metadata.max_seq_len, "max_decode_seq_len": metadata.max_decode_seq_len,
            "advanced": metadata.advanced, "step": metadata.step, "_table_lens": vars(metadata).get("_table_lens"),
        }  # fmt: skip
        super().__init__(metadata, attributes, tokens)
        arrays = [array for name in _WRITTEN if (array := getattr(own, name, None)) is not None]
        self.arrays = [(array, array.copy()) for array in arrays]  # which are written to
        self.table, self.rows = own.block_table, step.table.rows
        self.table_rows = self.table[self.rows]
        self.pages = getattr(own, "paged_kv_indices", None)
        self.kept = vars(metadata).get("_kept")  # the plan of the step, which lives as long

    def restore(self, metadata: Any) -> dict[str, Any]:
        held: dict[str, Any] = object.__getattribute__(metadata, "__dict__")
        host = held["host"]
        for array, values in self.arrays:
            array[...] = values
        self.table[self.rows] = self.table_rows
        set_own_array(host, "block_table", self.table)
        if self.pages is not None:
            set_own_array(host, "paged_kv_indices", self.pages)
        held.update(self.attributes)
        _update_views(held, table_changed=True)
        if self.kept is not None:
            held["_kept"] = self.kept
        return held
