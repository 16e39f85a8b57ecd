"""Fields that an engine adds to the metadata of each step: ``MetadataBuilder.register_field``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.builder.fields import FIELDS, Field, Length, engine_field
from attncore.builder.persistent.host_fields import HostFields
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.builder.slices import own_array
from attncore.quoted import plain_text, quoted

FillField = Callable[[StepMetadata, npt.NDArray[Any]], None]

_DECLARED = [name for owner in StepMetadata.__mro__ for name in vars(owner).get("__annotations__", ())]
_TAKEN = frozenset(("host", *FIELDS, *dir(StepMetadata), *dir(HostFields), *_DECLARED))
"""Names that metadata has for something of its own, in its classes or in an object."""


class EngineFields:
    """The registered fields and the functions that fill them, in the order of registration."""

    def __init__(self) -> None:
        self._fills: dict[str, tuple[Field, FillField]] = {}

    def __bool__(self) -> bool:
        return bool(self._fills)

    @property
    def fields(self) -> list[Field]:
        return [field for field, _ in self._fills.values()]

    def add(self, field: Field, fill: FillField) -> None:
        self._fills[field.name] = field, fill

    @property
    def registered(self) -> dict[str, tuple[Field, FillField]]:
        """All of them, for ``restore``."""
        return self._fills.copy()

    def restore(self, registered: dict[str, tuple[Field, FillField]]) -> None:
        """Takes back what ``add`` or ``register`` added since."""
        self._fills = registered

    def register(self, given: Any, dtype: Any, per: Any, fill: Any) -> None:
        """Adds a field; raises ValueError or TypeError that names the wrong argument."""
        name = plain_text(given)
        if name is None or not name.isidentifier() or name.startswith("_") or name in _TAKEN:
            raise ValueError(f"name: {quoted(given)} is not a free name for a field of metadata")
        if name in self._fills:
            raise ValueError(f"name: {name!r} is registered already")
        word = plain_text(per)
        if word not in ("token", "request"):
            raise ValueError(f"per: {quoted(per)} is neither token nor request")
        if not callable(fill):
            raise TypeError(f"fill: {fill!r} is not a function of metadata and the array to fill")
        field_dtype = np.dtype(dtype)
        if field_dtype.kind not in "iufb":
            raise TypeError(f"dtype: {field_dtype} is not one of numbers")
        self.add(engine_field(name, field_dtype.type, Length.TOKEN if word == "token" else Length.REQUEST), fill)

    def fill(self, metadata: StepMetadata) -> None:
        """Writes the values of a step; elements that a field's ``fill`` leaves are 0."""
        for name, (_, fill) in self._fills.items():
            array = own_array(metadata.host, name)
            out = np.zeros(array.shape, array.dtype)  # of the arena itself the base would be all of its memory
            fill(metadata, out)
            array[...] = out
