"""The host arrays of a step of the persistent builder: NumPy views of an arena, cut to the step's lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from attncore.builder.device.arena import Arrays
from attncore.builder.fields import DERIVED, FIELDS, Field, Length, named, no_such_field
from attncore.builder.read_only import kept, read_only
from attncore.builder.reused import Reused
from attncore.builder.show import host_text
from attncore.errors import AttncoreError
from attncore.show import guarded

if TYPE_CHECKING:
    from attncore.builder.persistent.block_table import BlockTable

BY_TOKEN = frozenset(named(Length.TOKEN))
BY_REQUEST = frozenset(named(Length.REQUEST, Length.TABLE))
BY_START = frozenset(named(Length.START))
BY_ENCODER_TOKEN = frozenset(named(Length.ENCODER_TOKEN))
STEP_ARRAYS = BY_TOKEN | BY_REQUEST | BY_START | BY_ENCODER_TOKEN
"""The arrays that a step has without gathering or deriving them."""


class HostFields(Reused):
    """Read-only views of an arena, cut to its step: made on first use, dropped when a step has other counts.

    Each access gives an array of its own: the shape that a caller sets on one is not that of the next step's.
    """

    def __init__(
        self, arena: Any, arrays: Arrays, tables: Mapping[str, BlockTable], state: Any, extra: Mapping[str, Field]
    ) -> None:
        self._arena, self._arrays, self._tables, self._state, self._extra = arena, arrays, tables, state, extra
        self._kept_views: dict[str, npt.NDArray[Any]] = {}  # the kernel drops them
        self._spans_of_step: int | None = -1  # the step that has ``span_ends``; None: every one

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        if name in DERIVED:  # not kept: the next step in this arena has other values
            return read_only(FIELDS[name].derive(self))  # type: ignore[misc]
        if name not in STEP_ARRAYS:
            if name.startswith("_"):  # copy.copy asks before the copy has any attribute
                raise AttributeError(name)
            if name not in self._extra:
                raise no_such_field("metadata.host", name, self._extra)
        view = self._kept_views.get(name)  # of an engine's field
        if view is None:
            array = self._memory(name)
            if array is None:
                raise AttributeError(f"metadata.host of this batch and group has no field {name!r}")
            view = self._kept_views[name] = kept(cut(array, name, self._arena, self._extra))
        return view.view()

    def _memory(self, name: str) -> npt.NDArray[Any] | None:
        """The array that a field of every step is the beginning of, which kernels write; None for no field of these."""
        if name == "span_ends" and self._spans_of_step not in (None, self._arena.step):
            return None
        return self._tables[name].array if name in self._tables else self._arrays.get(name)

    def _own(self, name: str) -> npt.NDArray[Any] | None:
        """The field of this step in that array, or what is gathered for the caller; None for a field it has not."""
        if name == "paged_kv_indices":
            return self._gather_pages()
        array = self._memory(name)
        return None if array is None else cut(array, name, self._arena, self._extra)

    __repr__ = guarded(host_text)

    def __dir__(self) -> list[str]:
        return sorted(({*super().__dir__()} - STEP_ARRAYS) | {*self.field_names()})

    def __copy__(self) -> HostFields:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "metadata.host: it cannot be pickled or copied deeply, for its arrays are the builder's memory; send "
            "metadata.asdict_zerocopy(), and make metadata of that with attncore.builder.metadata_from_fields"
        )

    def field_names(self) -> list[str]:
        """The fields that steps of this group have."""
        names = (STEP_ARRAYS | self._extra.keys()) & (self._arrays.keys() | self._tables.keys())
        if self._memory("span_ends") is None:
            names -= {"span_ends"}
        return sorted({*names, "paged_kv_indices", *DERIVED})

    def peek(self, name: str) -> npt.NDArray[Any] | None:
        """A field of the step, of which no view is kept; None for one that it does not have, or would gather."""
        array = self._memory(name)
        return None if array is None else read_only(cut(array, name, self._arena, self._extra))

    @property
    def _live_table(self) -> BlockTable:
        """The table of the step's group, which later changes of the batch change too."""
        return self._tables["block_table"]

    @property
    def table_changed(self) -> bool:
        """Whether blocks have moved or left since the step was built."""
        return bool(self._arena.changes != self._state.changes)

    @property
    def paged_kv_indices(self) -> npt.NDArray[np.int32]:
        """int32[paged_kv_indptr[-1]]: gathered from the live table on access, so that other steps pay nothing.

        Raises AttncoreError once blocks have moved or left since the step was built.
        """
        return read_only(self._gather_pages())

    def _gather_pages(self) -> npt.NDArray[np.int32]:
        pages: npt.NDArray[np.int32] = read_alone(self._state, self._arena, self._live_pages)
        return pages

    def _live_pages(self) -> npt.NDArray[np.int32]:
        if self.table_changed:
            raise AttncoreError(
                "paged_kv_indices: blocks have moved or left since this step was built; ask for them before the batch "
                "changes"
            )
        return self._live_table.page_indices(self.paged_kv_indptr)


def read_alone(state: Any, arena: Any, read: Callable[[], Any]) -> Any:
    """The result of ``read``, of the step in ``arena`` and of tables that a build changes.

    ConcurrentUseError where another thread is inside, or was meanwhile and has changed them: what was read is then of
    two steps, and what ``read`` raises says nothing.
    """

    def check() -> None:
        state.check_reader()
        if (arena.step, state.changes) != before:
            raise state.refused()

    before = arena.step, state.changes
    state.check_reader()
    try:
        found = read()
    except Exception:
        check()
        raise
    check()
    return found


def _view_of(name: str) -> Any:
    def view(host: HostFields) -> npt.NDArray[Any]:
        try:
            return host._kept_views[name].view()
        except KeyError:
            raise AttributeError(name) from None  # goes to __getattr__

    return property(view)


for _name in STEP_ARRAYS:
    setattr(HostFields, _name, _view_of(_name))


def _span_ends(host: HostFields) -> npt.NDArray[np.int32] | None:
    """Not kept: the next step in the arena may have none."""
    if "span_ends" not in host._arrays:
        raise AttributeError("span_ends")  # goes to __getattr__
    return host.peek("span_ends")


setattr(HostFields, "span_ends", property(_span_ends))  # noqa: B010  (as for the fields above)


def cut(array: Any, name: str, arena: Any, extra: Mapping[str, Field]) -> Any:
    """The part of an array that a step in ``arena`` fills."""
    if name in BY_TOKEN or (name in extra and extra[name].length is Length.TOKEN):
        return array[: arena.num_tokens]
    if name in BY_ENCODER_TOKEN:
        return array[: arena.num_cross_slots]
    return array[: arena.num_reqs + (name in BY_START)]
