"""The captured sizes of a builder: what it keeps for each size of step that a graph was captured for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NoReturn, TypeVar

from attncore.errors import CaptureError
from attncore.show import counted

Entry = TypeVar("Entry")
Bucket = int | tuple[int, int]
"""What a captured size is known by: its requests; or its requests and the tokens of all of them, of any lengths."""


def of_size(bucket: Bucket) -> str:
    """``4 requests``; ``4 requests and 32 tokens``."""
    if isinstance(bucket, tuple):
        return f"{counted(bucket[0], 'request')} and {counted(bucket[1], 'token')}"
    return counted(bucket, "request")


def ascending(bucket: Bucket) -> tuple[bool, Bucket]:
    """By which captured sizes are sorted: those of requests alone come first."""
    return isinstance(bucket, tuple), bucket


class CapturedSizes(Generic[Entry]):
    """An entry for each captured size."""

    def __init__(self) -> None:
        self._entries: dict[Any, Entry] = {}

    def __iter__(self) -> Iterator[Any]:
        """The sizes, ascending."""
        return iter(sorted(self._entries, key=ascending))

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, bucket: Bucket) -> Entry:
        return self._entries[bucket]

    def __setitem__(self, bucket: Bucket, entry: Entry) -> None:
        self._entries[bucket] = entry

    def get(self, bucket: Bucket) -> Entry | None:
        """The size's entry; None where it was not captured."""
        return self._entries.get(bucket)

    def entries(self) -> list[Entry]:
        """The entries of all sizes; another thread may capture or release one meanwhile."""
        return list(self._entries.values())

    def drop(self, bucket: Bucket) -> None:
        """Removes a size, where it was captured."""
        self._entries.pop(bucket, None)

    def sizes(self, only: Bucket | None = None) -> tuple[Any, ...]:
        """The captured sizes, ascending; ``only``, where given, leaves out the others."""
        return tuple(bucket for bucket in self if only in (None, bucket))

    def refuse(self, asked: str, do: str, only: Bucket | None = None) -> NoReturn:
        """Raises CaptureError: ``asked`` was not captured, which sizes were, and what to ``do``."""
        known = ", ".join(map(str, self.sizes(only))) or "none"
        raise CaptureError(f"{asked} was not captured (captured: {known}); {do}")
