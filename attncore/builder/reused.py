"""Objects that a builder uses again for later steps: what is set on one would be read as a field of those."""

from __future__ import annotations

from typing import Any, NoReturn

from attncore.builder.fields import ARRAYS, BROADCAST

OF_THE_BUILDER = frozenset((*ARRAYS, *BROADCAST, "host", "groups", "group", "step", "req_ids", "moves"))


class Reused:
    """The base of metadata, and of its ``host``, whose fields are the builder's; it sets them by ``vars``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_field(name):
            _refuse(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_field(name):
            _refuse(name)
        object.__delattr__(self, name)

    def _is_field(self, name: str) -> bool:
        return name in OF_THE_BUILDER or name in vars(self).get("_extra", ())


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"metadata: {name} cannot be set, for later steps use the same object; "
        "attncore.builder.metadata_from_fields(metadata.asdict_zerocopy()) is a step of your own"
    )
