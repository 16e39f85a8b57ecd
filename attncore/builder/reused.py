"""Objects that a builder uses again for later steps: what is set on one would be read as a field of those."""

from __future__ import annotations

from typing import Any

from attncore.builder.fields import ARRAYS, BROADCAST
from attncore.did_you_mean import did_you_mean

OF_THE_BUILDER = frozenset((*ARRAYS, *BROADCAST, "host", "groups", "group", "states", "advanced"))


class Reused:
    """The base of metadata, and of its ``host``, whose fields are the builder's; it sets them by ``vars``.

    A copy (``copy.copy``) is the caller's: it has ``_copied``. Names that are like no field are an engine's own.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_name(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._check_name(name)
        object.__delattr__(self, name)

    def _check_name(self, name: str) -> None:
        """AttributeError for a name of the builder's, and for one that is such a name misspelt."""
        held = vars(self)
        if name.startswith("_") or "_copied" in held:
            return
        of, own = "metadata", "copy.copy(metadata) is an object of your own"
        if "host" not in held:  # it is the host; a copy of the metadata has the same one
            of, own = "metadata.host", "metadata_from_fields(metadata.asdict_zerocopy()) has a host of its own"
        fields = {*OF_THE_BUILDER, *held.get("_extra", ())}
        if name in fields or hasattr(type(self), name):
            raise AttributeError(f"{of}: {name} cannot be set, for later steps use the same object; {own}")
        if name not in held and (meant := did_you_mean(name, fields)):
            raise AttributeError(f"{of}: no field {name!r}{meant}")
