"""Fields that an engine adds to the metadata of each step: ``MetadataBuilder.register_field``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.builder.fields import FIELDS, Field, Length, engine_field
from attncore.builder.persistent.columns import Column
from attncore.builder.persistent.host_fields import HostFields
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.builder.slices import own_array
from attncore.quoted import plain_text, quoted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore

FillField = Callable[[StepMetadata, npt.NDArray[Any]], None]

MOST_COLUMNS = 16
"""Columns that a builder may have: the kernels' MAX_COLUMNS."""

_DECLARED = [name for owner in StepMetadata.__mro__ for name in vars(owner).get("__annotations__", ())]
_TAKEN = frozenset(("host", *FIELDS, *dir(StepMetadata), *dir(HostFields), *_DECLARED))
"""Names that metadata has for something of its own, in its classes or in an object."""


class EngineFields:
    """The registered fields and the functions that fill them, in the order of registration."""

    def __init__(self) -> None:
        self._fills: dict[str, tuple[Field, FillField | Column]] = {}

    @property
    def columns(self) -> list[Column]:
        """The columns, which the kernels fill."""
        return [fill for _, fill in self._fills.values() if isinstance(fill, Column)]

    @property
    def functions(self) -> bool:
        """Whether a field is filled by a function of the engine's."""
        return len(self._fills) > len(self.columns)

    @property
    def fields(self) -> list[Field]:
        return [field for field, _ in self._fills.values()]

    def add(self, field: Field, fill: FillField | Column) -> None:
        self._fills[field.name] = field, fill

    @property
    def registered(self) -> dict[str, tuple[Field, FillField | Column]]:
        """All of them, for ``restore``."""
        return self._fills.copy()

    def restore(self, registered: dict[str, tuple[Field, FillField | Column]]) -> None:
        """Takes back what ``add`` or ``register`` added since."""
        self._fills = registered

    def register(self, given: Any, dtype: Any, per: Any, fill: Any) -> None:
        """Adds a field; raises ValueError or TypeError that names the wrong argument."""
        name = self._checked_name("name", given)
        word = plain_text(per)
        if word not in ("token", "request"):
            raise ValueError(f"per: {quoted(per)} is neither token nor request")
        if not callable(fill):
            raise TypeError(f"fill: {quoted(fill)} is not a function of metadata and the array to fill")
        field_dtype = arguments.dtype("dtype", dtype)
        if field_dtype.kind not in "iufb":
            raise TypeError(f"dtype: {field_dtype} is not one of numbers")
        self.add(engine_field(name, field_dtype.type, Length.TOKEN if word == "token" else Length.REQUEST), fill)

    def register_column(self, column: Any, core: BatchCore) -> None:
        """Adds a field that is a column of the batch ``core``; ValueError or TypeError where it is none."""
        if not isinstance(column, Column):
            raise TypeError(f"column: {quoted(column)} is not a column; batch.column(name, dtype) makes one")
        if not any(column is own for own in core.columns.values()):
            raise ValueError(f"column: {column.name!r} is another batch's; make one of the builder's batch")
        if len(self.columns) == MOST_COLUMNS:
            raise ValueError(f"column: {MOST_COLUMNS} are registered already, which is the most")
        length = Length.TOKEN if column.per_token else Length.REQUEST
        self.add(engine_field(self._checked_name("column", column.name), column.dtype.type, length), column)

    def _checked_name(self, argument: str, given: Any) -> str:
        name = plain_text(given)
        if name is None or not name.isidentifier() or name.startswith("_") or name in _TAKEN:
            raise ValueError(f"{argument}: {quoted(given)} is not a free name for a field of metadata")
        arguments.name(argument, name)
        if name in self._fills:
            raise ValueError(f"{argument}: {name!r} is registered already")
        return name

    def fill(self, metadata: StepMetadata) -> None:
        """Writes the values of a step; elements that a field's ``fill`` leaves are 0."""
        for name, (_, fill) in self._fills.items():
            if isinstance(fill, Column):
                continue
            array = own_array(metadata.host, name)
            out = np.zeros(array.shape, array.dtype)  # of the arena itself the base would be all of its memory
            fill(metadata, out)
            array[...] = out
        metadata.forget_made()
