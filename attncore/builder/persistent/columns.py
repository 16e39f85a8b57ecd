"""Columns of a batch: numbers that an engine keeps for its requests, which each step has by row or by token."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import check_readable
from attncore.builder.device.memory import zeros
from attncore.builder.uncopied import Uncopied
from attncore.kernels import codes
from attncore.quoted import plain_text, quoted
from attncore.show import angled, counted, guarded, short

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.step_metadata import StepMetadata


class Column(Uncopied):
    """One number for each request of a batch, such as its temperature; made by ``InputBatch.column``.

    ``column[req_id]`` reads and sets it. It stays with the request while its row changes, and is 0 when the request is
    added. ``MetadataBuilder.register_column`` makes it a field of each step, without a function of the engine's.
    """

    per_token = False

    def __init__(self, core: BatchCore, name: str, dtype: np.dtype[Any], width: int = 1, unknown: Any = 0) -> None:
        n = core.max_num_reqs
        self._core, self.name, self.dtype, self._unknown = core, name, dtype, unknown
        self._values = zeros((n, width * dtype.itemsize), np.uint8).view(dtype)
        if unknown:
            self._values[:] = unknown  # of requests that are in the batch already, too
        self._given, self._num_given = zeros(n, np.int64), zeros(n, np.int32)
        self.state = core.kernels.ColumnState(
            self._values.view(np.uint8),
            dtype.itemsize,
            self.per_token,
            self._given,
            self._num_given,
            dtype.kind == "i",
        )

    @guarded
    def __repr__(self) -> str:
        width = self._values.shape[1]
        facts = [short(self.name), str(self.dtype), *([f"{width} of each request"] if width > 1 else [])]
        return angled(type(self).__name__, facts)

    def __getitem__(self, req_id: Hashable) -> Any:
        """The request's value; ValueError where it is not in the batch."""
        return self._core.read(req_id, lambda row: self._value(self._values[self._place(row)].copy()))

    def __setitem__(self, req_id: Hashable, value: Any) -> None:
        checked = self._checked("value", value)
        if checked.ndim > 1 or checked.size not in (1, self._values.shape[1]):
            raise ValueError(f"value: {quoted(value)} for a column of width {self._values.shape[1]}")
        with self._core.enter():
            self._values[self._place(self._core.order.row(req_id))] = checked

    __iter__ = __contains__ = None  # a column is asked by request: Python would ask for 0, 1, 2 and so on

    def write(self, metadata: StepMetadata, values: Any) -> None:
        """Sets the values of a step's requests, in the order of ``metadata.req_ids``; what is behind them is not read.

        One value for each is the first of its width; an array [n, k] has the first k. Lists of ints cost least.
        Requests that have left since the step was built are passed over. Raises ValueError for fewer values, and for a
        step of another batch.
        """
        self._check_step(metadata)
        core, n = self._core, len(metadata.req_ids)
        if type(values) is list:
            with core.enter():
                if self._has_rows_of(metadata) and self.state.write(core.state, values, n):
                    return
        given = self._checked("values", values)
        if given.ndim == 0 or len(given) < n:
            raise ValueError(f"values: {given.shape} for a step of {counted(n, 'request')}; give one for each")
        given = given[:n, None] if given.ndim == 1 else given[:n]
        items = given.shape[1]
        if given.ndim > 2 or items > self._values.shape[1]:
            raise ValueError(f"values: {given.shape} for a column of width {self._values.shape[1]}")
        with core.enter():
            places, kept = self._places_of(metadata)
            self._values[places, :items] = given[kept]

    def _check_step(self, metadata: StepMetadata) -> None:
        """TypeError where ``metadata`` is no step of a MetadataBuilder, ValueError where it is one of another batch."""
        try:
            core = metadata._owner.core
        except AttributeError:
            raise TypeError(f"metadata: {quoted(metadata)} is no step; pass what build() returned") from None
        if core is not self._core:
            raise ValueError(f"metadata: a step of another batch than that of column {self.name!r}")

    def _places_of(self, metadata: StepMetadata) -> tuple[Any, Any]:
        """The places of a step's requests that have not left, and which rows of the step these are."""
        core, req_ids = self._core, metadata.req_ids
        if self._has_rows_of(metadata):
            return core.places(slice(len(req_ids))), slice(None)
        rows = np.array([core.order.row_of.get(req_id, -1) for req_id in req_ids], np.intp)
        places = core.places(rows)
        # A request of the same name that came later is another one.
        kept = np.flatnonzero((rows >= 0) & ~core.came_later(places, metadata))
        return places[kept], kept

    def _has_rows_of(self, metadata: StepMetadata) -> bool:
        """Whether the rows of a step are still those of the batch."""
        arena, state = metadata._arena, self._core.state
        return arena.req_ids is state.req_ids and arena.changes == state.changes

    def clear(self, row: int) -> None:
        """Makes the values of a row unknown, 0 in other columns, for the request that is added to it."""
        place = self._place(row)
        self._values[place] = self._unknown
        self.state.give(place, None)

    def _place(self, row: int) -> int:
        return int(self._core.lengths[codes.PLACE, row])

    def _checked(self, name: str, value: Any) -> npt.NDArray[Any]:
        check_readable(name, value)
        try:
            given = np.asarray(value) if np.size(value) else np.zeros(np.shape(value), self.dtype)
            whole = given.dtype.kind in "iub" and self.dtype.kind in "iub"  # by value: an int is signed for NumPy
            with np.errstate(over="ignore"):  # what becomes infinite is refused below
                checked = given.astype(self.dtype, casting="unsafe" if whole else "same_kind")
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, of a tensor that needs gradients
            raise TypeError(f"{name}: {quoted(value)} is not of {self.dtype}, as column {self.name!r} is") from None
        if given.dtype != self.dtype and not _fits(given, checked, whole=whole):
            raise ValueError(f"{name}: {quoted(value)} does not fit {self.dtype}, as column {self.name!r} is")
        return checked

    def _value(self, items: npt.NDArray[Any]) -> Any:
        return items[0].item()


class TokenColumn(Column):
    """What each token of a step is, such as its id; made by ``InputBatch.token_column``.

    The token at position p of a request is the p-th of those that it was given (``give``), and behind them the
    request's own value: the token that was sampled last. With ``width`` it has that many, for drafts: the first token
    that is not given takes the first one.

    ``unknown``, -1 as a rule, is what a step has where nothing was written since the request was added, or since
    ``leave``: the host does not know the token yet. A graph takes what the device sampled where the id is below 0.
    """

    per_token = True

    def give(self, req_id: Hashable, tokens: Any) -> None:
        """The request's tokens at positions 0, 1, 2, ...: its prompt, or all it has where it is computed again.

        They are copied. Pass an array of the column's dtype where that matters: a list is converted number by number.
        ValueError where the request is not in the batch.
        """
        array = np.array(self._checked("tokens", tokens), order="C")  # an array that is resized loses its memory
        if array.ndim != 1:
            raise ValueError(f"tokens: an array of shape {array.shape}; give one number a token")
        with self._core.enter():
            place = self._place(self._core.order.row(req_id))
            self._core.undo.append((self.state.give, place, self.state.tokens_of(place)))
            self.state.give(place, array.view(np.uint8))

    def leave(self, metadata: StepMetadata) -> None:
        """Makes the own values of a step's requests ``unknown``, until the next ``write`` or ``column[req_id] = ...``.

        For a step whose tokens the host will not read before the next build. Given tokens stay.
        """
        self._check_step(metadata)
        with self._core.enter():
            self._values[self._places_of(metadata)[0]] = self._unknown

    def _checked(self, name: str, value: Any) -> npt.NDArray[Any]:
        if type(value) is np.ndarray and value.dtype == self.dtype:
            return value
        return super()._checked(name, value)

    def _value(self, items: npt.NDArray[Any]) -> Any:
        return items[0].item() if len(items) == 1 else items


class KeepsColumns:
    """The columns of an InputBatch."""

    _core: BatchCore

    def column(self, name: str, dtype: Any) -> Column:
        """A new Column ``name`` of numbers of ``dtype``, one for each request, 0 at first."""
        column = Column(self._core, *self._checked_column(name, dtype))
        self._add_column(column)
        return column

    def token_column(self, name: str, dtype: Any = np.int64, *, width: int = 1, unknown: int = 0) -> TokenColumn:
        """A new TokenColumn ``name``: one number for each token; ``width`` of them behind the given ones (drafts).

        ``unknown``, such as -1, stands for tokens that the host does not know yet.
        """
        width = arguments.integer("width", width, 1)
        name, found = self._checked_column(name, dtype)
        column = TokenColumn(self._core, name, found, width, _checked_unknown(unknown, found))
        self._add_column(column)
        return column

    def _checked_column(self, given: Any, dtype: Any) -> tuple[str, np.dtype[Any]]:
        name = plain_text(given)
        if name is None or not name.isidentifier():
            raise ValueError(f"name: {quoted(given)} is not a name for a column")
        arguments.name("name", name)
        if name in self._core.columns:
            raise ValueError(f"name: the batch has a column {name!r} already")
        found = arguments.dtype("dtype", dtype)  # kernels write numbers of this machine
        if found.kind not in "iufb":
            raise TypeError(f"dtype: {found} is not one of numbers")
        if found.itemsize > 8:
            raise TypeError(f"dtype: {found} has {found.itemsize} bytes a number, and no tensor has; give float64")
        return name, found

    def _add_column(self, column: Column) -> None:
        with self._core.enter():
            self._core.columns[column.name] = column


def _fits(given: npt.NDArray[Any], checked: npt.NDArray[Any], *, whole: bool) -> bool:
    """Whether ``checked`` says what ``given`` says: the same whole numbers, or floats of which none became infinite."""
    if whole:
        return bool((checked == given).all())
    return checked.dtype.kind != "f" or bool((np.isfinite(checked) >= np.isfinite(given)).all())


def _checked_unknown(unknown: Any, dtype: np.dtype[Any]) -> int:
    """``unknown`` as an int; TypeError or ValueError where no item of ``dtype`` is that number."""
    number = arguments.integer("unknown", unknown, -INT32_MAX)
    with np.errstate(over="ignore"):
        held = np.array(number).astype(dtype)
    if not np.isfinite(held) or int(held) != number:
        raise ValueError(f"unknown: {number} does not fit {dtype}; choose a signed dtype, or another number")
    return number


def fill_from(columns: Iterable[Column], arena: Any, arrays: dict[str, Any]) -> None:
    """Has every step in ``arena`` filled from ``columns``, into ``arrays`` by their names."""
    for column in columns:
        arena.add_column(column.state, arrays[column.name].view(np.uint8))
