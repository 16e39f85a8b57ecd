"""Which request is in which row of a batch: names by row, empty rows, and rows of preempted requests.

``req_ids`` and ``paused`` are authoritative: each change reaches them first, and ``derive`` makes the rest of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any


class RequestRows:
    """The order of rows. ``holes`` are empty rows below the last one in use; ``paused`` are preempted requests."""

    def __init__(self) -> None:
        self.req_ids: list[Any] = []
        """The request of each row; None: an empty row."""
        self.row_of: dict[Hashable, int] = {}
        self.holes: set[int] = set()
        self.paused: set[int] = set()

    def __len__(self) -> int:
        """Rows in use, including holes."""
        return len(self.req_ids)

    @property
    def num_reqs(self) -> int:
        """Requests, counted by row: an ``__eq__`` that lies makes two of them one key of ``row_of``."""
        return len(self.req_ids) - len(self.holes)

    def row(self, req_id: Hashable) -> int:
        """The request's row; ValueError where it is not in the batch."""
        try:
            return self.row_of[req_id]
        except KeyError:
            raise ValueError(f"req_id: {req_id!r} is not in the batch") from None
        except TypeError as error:
            raise TypeError(f"req_id: {req_id!r} cannot name a request ({error})") from None

    def free_row(self) -> int:
        """The row for the next request: the lowest hole, or a new row."""
        return min(self.holes) if self.holes else len(self.req_ids)

    def add(self, req_id: Hashable, row: int) -> None:
        """Puts the request into ``row``, which ``free_row`` returned."""
        if row == len(self.req_ids):
            self.req_ids.append(req_id)
        else:
            self.req_ids[row] = req_id
            self.holes.discard(row)
        self.row_of[req_id] = row

    def remove(self, req_id: Hashable, row: int) -> None:
        """Turns the request's row into a hole."""
        self.row_of.pop(req_id, None)
        self.req_ids[row] = None
        self.holes.add(row)
        self.paused.discard(row)
        self.drop_last_holes()

    def drop_last_holes(self) -> None:
        """Drops the holes behind the last request."""
        while self.req_ids and self.req_ids[-1] is None:
            self.req_ids.pop()
            self.holes.discard(len(self.req_ids))

    def exchange(self, moves: Iterable[tuple[int, int]]) -> None:
        """Swaps pairs of rows, in turn."""
        ids = self.req_ids
        for i, j in moves:
            ids[i], ids[j] = ids[j], ids[i]
            for rows in (self.holes, self.paused):
                if (i in rows) != (j in rows):
                    rows.symmetric_difference_update((i, j))
            for row in (i, j):
                if ids[row] is not None:
                    self.row_of[ids[row]] = row

    def put(self, row: int, req_id: Hashable | None, *, paused: bool = False) -> None:
        """Makes ``req_id`` the request of ``row``, None a hole, and ``paused`` whether it is preempted."""
        self.req_ids.extend([None] * (row + 1 - len(self.req_ids)))
        self.req_ids[row] = req_id
        (self.paused.add if paused else self.paused.discard)(row)
        self.derive()

    def derive(self) -> None:
        """Drops the holes behind the last request, and makes ``row_of`` and ``holes`` anew."""
        while self.req_ids and self.req_ids[-1] is None:
            self.req_ids.pop()
        self.row_of = {req_id: row for row, req_id in enumerate(self.req_ids) if req_id is not None}
        self.holes = {row for row, req_id in enumerate(self.req_ids) if req_id is None}
