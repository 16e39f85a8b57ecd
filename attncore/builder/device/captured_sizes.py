"""The captured sizes of a builder: what it keeps for each number of requests that a graph was captured for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NoReturn, TypeVar

from attncore.errors import CaptureError

Entry = TypeVar("Entry")


class CapturedSizes(Generic[Entry]):
    """An entry for each captured size (requests of a padded step)."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def __iter__(self) -> Iterator[int]:
        """The sizes, ascending."""
        return iter(sorted(self._entries))

    def __contains__(self, num_reqs: int) -> bool:
        return num_reqs in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, num_reqs: int) -> Entry:
        return self._entries[num_reqs]

    def __setitem__(self, num_reqs: int, entry: Entry) -> None:
        self._entries[num_reqs] = entry

    def get(self, num_reqs: int) -> Entry | None:
        """The size's entry; None where it was not captured."""
        return self._entries.get(num_reqs)

    def entries(self) -> list[Entry]:
        """The entries of all sizes; another thread may capture or release one meanwhile."""
        return list(self._entries.values())

    def drop(self, num_reqs: int) -> None:
        """Removes a size, where it was captured."""
        self._entries.pop(num_reqs, None)

    def sizes(self, only: int | None = None) -> tuple[int, ...]:
        """The captured sizes, ascending; ``only``, where given, leaves out the others."""
        return tuple(num_reqs for num_reqs in self if only in (None, num_reqs))

    def refuse(self, asked: str, do: str, only: int | None = None) -> NoReturn:
        """Raises CaptureError: ``asked`` was not captured, which sizes were, and what to ``do``."""
        known = ", ".join(map(str, self.sizes(only))) or "none"
        raise CaptureError(f"{asked} was not captured (captured: {known}); {do}")
