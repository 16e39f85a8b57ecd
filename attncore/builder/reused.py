"""Objects that a builder uses again for later steps: what is set on one would be read as a field of those."""

from __future__ import annotations

from typing import Any, NoReturn

from attncore.builder.fields import ARRAYS, BROADCAST

OF_THE_BUILDER = frozenset((*ARRAYS, *BROADCAST, "host", "groups", "group", "advanced"))


class Reused:
    """The base of metadata, and of its ``host``, whose fields are the builder's; it sets them by ``vars``.

    A copy (``copy.copy``) is the caller's: it has ``_copied``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_builders(name):
            _refuse(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_the_builders(name):
            _refuse(name)
        object.__delattr__(self, name)

    def _is_the_builders(self, name: str) -> bool:
        held = vars(self)
        if name.startswith("_") or "_copied" in held:
            return False
        return name in OF_THE_BUILDER or name in held.get("_extra", ()) or hasattr(type(self), name)


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"metadata: {name} cannot be set, for later steps use the same object; "
        "copy.copy(metadata) is an object of your own"
    )
