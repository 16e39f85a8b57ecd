"""Slices of a step's host arrays as a batch of their own, rebased as ``fields.FIELDS`` declares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.array_arguments import as_array
from attncore.builder.fields import DERIVED, ENCODER_ARRAYS, FIELDS, Length, Owner, Rebase, no_such_field
from attncore.builder.read_only import kept, read_only
from attncore.builder.show import host_text
from attncore.show import guarded

_WITH_ENCODER = tuple(
    (name, field.length, field.rebase, name in ENCODER_ARRAYS)
    for name, field in FIELDS.items()
    if field.length is not Length.PAGE and not field.internal and field.derive is None
)
_CROSS = tuple(name for name, field in FIELDS.items() if field.owner is Owner.CROSS)
_WITHOUT_ENCODER = tuple(sliced for sliced in _WITH_ENCODER if sliced[0] not in ENCODER_ARRAYS)


class HostArrays:
    """Host arrays by name: what is read is a read-only view of the array that was set, one of its own each time.

    The page indices of a view are cut out on access: gathering them is slow, and few views need them.
    """

    def __init__(self, **arrays: Any) -> None:
        vars(self)["_arrays"] = SimpleNamespace(**arrays)  # the arrays themselves, for the builders, which write them
        vars(self)["_kept_views"] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy.copy asks before the copy has any attribute
            raise AttributeError(name)
        view = self._kept_views.get(name)
        if view is None:
            field = FIELDS.get(name)
            if field is not None and field.derive is not None:
                return read_only(field.derive(self))  # not kept: the arrays may be those of another step the next time
            array = self._own(name)
            if array is None:
                if name in vars(self._arrays):
                    return None  # a field of the builder's that this step does without
                raise no_such_field("metadata.host", name)
            view = self._kept_views[name] = kept(array)
        return view.view()

    def __setattr__(self, name: str, array: Any) -> None:
        array = _own_of(name, array)
        vars(self)["_replaced"] = name  # what was built is no longer all of the step; first, for a signal may end this
        set_own_array(self, name, array)

    def __delattr__(self, name: str) -> None:
        if name not in vars(self._arrays):
            raise no_such_field("metadata.host", name)
        vars(self)["_replaced"] = name
        delattr(self._arrays, name)
        self._kept_views.pop(name, None)

    def _own(self, name: str) -> Any:
        """The array of a field, which builders may write to; None for a field that the step does not have."""
        arrays = vars(self._arrays)
        if name == "paged_kv_indices" and name not in arrays and "_pages" in vars(self):
            whole, start, stop = self._pages
            pages = whole._own(name)
            return None if pages is None else arrays.setdefault(name, pages[start:stop])
        return arrays.get(name)

    _memory = _own

    __repr__ = guarded(host_text)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.field_names()})

    def field_names(self) -> list[str]:
        """The fields that the step has."""
        names = {name for name, array in vars(self._arrays).items() if name in FIELDS and array is not None}
        if "paged_kv_indptr" in names:
            names |= {"paged_kv_indices", *DERIVED}
        return sorted(names)

    def peek(self, name: str) -> Any:
        """A field, of which no view is kept; None for one that the step does not have, or would gather."""
        array = vars(self._arrays).get(name)
        return None if array is None else read_only(array)


def _own_of(name: str, values: Any) -> Any:
    """What is set as a field, as kernels take it: of the field's dtype, contiguous and writable, copied where it is
    not. ValueError that names the field where it is no array of such numbers.
    """
    field = FIELDS.get(name)
    if field is None:
        return values
    ndim = 1 + (field.length is Length.TABLE)
    if type(values) is np.ndarray and values.dtype == field.dtype and values.flags.carray and values.ndim == ndim:
        return values
    array = as_array(f"metadata.host.{name}", values)
    wanted = np.dtype(field.dtype)
    fits = array.ndim == ndim and (array.dtype.kind in "iu" or not array.size)
    own = np.require(array, wanted, ["C", "A", "W"]) if fits else array
    if not fits or (own is not array and not np.array_equal(own, array)):
        raise ValueError(f"metadata.host.{name}: {array.dtype}{list(array.shape)}; it must hold numbers of {wanted}")
    return own


def own_array(host: Any, name: str) -> Any:
    """The array behind a field of ``metadata.host``, for a builder; None for a field that the step does not have."""
    return host._own(name)


def is_cross(host: Any) -> bool:
    """Whether the keys are an encoder's (a cross group), and not those of the step's tokens: asked of a whole step.

    The host of a step on a device has no slots of these, and who sent a step may have skipped them. Then the lengths
    tell it, which are the encoder's in a cross group and count the tokens elsewhere, and the table; fields of the cross
    group alone where these were skipped, too, for a decoder group that is sent has them as well.
    """
    if hasattr(host, "slot_mapping"):
        return False
    names = "seq_lens", "encoder_seq_lens", "context_lens", "query_lens"
    lengths, encoder, contexts, queries = (getattr(host, name, None) for name in names)
    if lengths is not None and encoder is not None:
        return np.array_equal(encoder, lengths) and _same_table(host, unless_missing=True)
    if lengths is not None and _add_up(contexts, queries, lengths):
        return _same_table(host, unless_missing=False)
    return any(hasattr(host, name) for name in _CROSS)


def _add_up(contexts: Any, queries: Any, lengths: Any) -> bool:
    """Whether these lengths count the tokens; False where what says so was skipped."""
    said = contexts is not None and queries is not None and len(contexts) == len(queries)
    return said and np.array_equal(contexts + queries, lengths)


def _same_table(host: Any, *, unless_missing: bool) -> bool:
    """Whether a step's table is that of its encoder's tokens; ``unless_missing`` where one of them was skipped."""
    own, of_encoder = (getattr(host, name, None) for name in ("block_table", "cross_block_table"))
    return unless_missing if own is None or of_encoder is None else np.array_equal(own, of_encoder)


def own_arrays(host: Any) -> Any:
    """The arrays of ``metadata.host`` of a step of the list builder as attributes, for a builder to write to."""
    return host._arrays


def set_own_array(host: Any, name: str, array: npt.NDArray[Any]) -> None:
    """Makes ``array``, a builder's own, the field of a step of the list builder."""
    setattr(host._arrays, name, array)
    host._kept_views.pop(name, None)  # after it: who reads in between keeps no view of the old array


def replaced(host: Any) -> str | None:
    """The last field of a step of the list builder that was set or deleted from outside; None where none was."""
    name: str | None = vars(host).get("_replaced")
    return name


def slice_host(
    whole: Any, first: int, last: int, start: int, stop: int, whole_encoder: bool = False
) -> tuple[HostArrays, dict[str, int]]:
    """Rows first:last and tokens start:stop of a step's host arrays, and the counts of its encoder tokens; -1 where who
    sent it has skipped what says them.

    ``whole_encoder``: the encoder's arrays cover all rows, as in views of the first generation.
    """
    host = HostArrays()
    arrays, memory = vars(host._arrays), whole._memory
    has_encoder = _has_encoder(whole)
    for name, length, rebase, of_encoder in _WITH_ENCODER if has_encoder else _WITHOUT_ENCODER:
        array = memory(name)
        if name == "span_ends" and _does_without(whole, array, start, stop):
            arrays[name] = array = None
        if array is None:  # a cross group has no slot_mapping
            continue
        if length is Length.ENCODER_TOKEN and memory("encoder_query_start_loc") is None:
            continue  # skipped by who sent the step: whose tokens these are is not known
        if of_encoder and whole_encoder:
            arrays[name] = array
            continue
        arrays[name] = rebased(_cut(array, length, (first, last), (start, stop), whole), rebase, first, start)
    indptr = memory("paged_kv_indptr")
    if indptr is not None:
        vars(host)["_pages"] = whole, indptr[first], indptr[last]
    return host, _encoder_counts(host, whole, 0 if whole_encoder else first) if has_encoder else {}


def _has_encoder(whole: Any) -> bool:
    """Whether a step has fields of encoders; who sent it may have skipped their lengths."""
    if whole._memory("encoder_seq_lens") is not None:
        return True
    held = whole._arrays
    return not isinstance(held, dict) and not ENCODER_ARRAYS.isdisjoint(vars(held))


def _does_without(whole: Any, span_ends: Any, start: int, stop: int) -> bool:
    """Whether no token of a slice is in a span, of a step whose requests may have some."""
    if span_ends is not None:
        return not span_ends[start:stop].any()
    held = whole._arrays
    return "span_ends" in (held if isinstance(held, dict) else vars(held))


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
            starts = whole._memory("encoder_query_start_loc")
            return array[starts[first] : starts[last]]
    return array[first:last]


def _encoder_counts(host: Any, whole: Any, first: int) -> dict[str, int]:
    lens, starts = host._own("encoder_seq_lens"), host._own("encoder_seq_start_loc")
    if lens is None and starts is not None:
        lens = np.diff(starts)
    if lens is None:
        return dict.fromkeys(("num_encoder_tokens", "max_encoder_seq_len"), -1)
    queries = whole._memory("query_lens")
    unpadded = lens if queries is None else lens[: max(0, len(queries) - first)]  # the list builder pads lengths with 1
    return {"num_encoder_tokens": int(unpadded.sum()), "max_encoder_seq_len": int(lens.max(initial=0))}
