"""Which request is in which row of a batch: names by row, empty rows, and rows of preempted requests.

``req_ids`` and ``paused`` are authoritative: each change reaches them first, and ``derive`` makes the rest of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from attncore.errors import ConcurrentUseError
from attncore.quoted import MAX_PART, one_line, quoted

READS = 8
"""How often the names are read at most, until no other caller has changed them meanwhile."""


class RequestRows:
    """The order of rows. ``holes`` are empty rows below the last one in use; ``paused`` are preempted requests."""

    def __init__(self) -> None:
        self.req_ids: list[Any] = []
        """The request of each row; None: an empty row."""
        self.known: dict[Hashable, int] | None = {}
        """``row_of`` as far as it is made; None: not since ``derive``. Reading it runs no code."""
        self.changes = 0  # of ``req_ids``, counted behind each
        self.plain = True
        """Whether each name so far was a str or an int: finding one runs no code of others."""
        self.holes: set[int] = set()
        self.paused: set[int] = set()

    @property
    def row_of(self) -> dict[Hashable, int]:
        """The row of each request by its name, made anew after ``derive``. What the names' own code raises is raised.

        That code, a signal's handler or another thread may remove a request while the names are read: what was read
        is kept only where nothing has changed since. Inside a call that has entered the batch, nothing does.
        """
        for _ in range(READS):
            if (known := self.known) is not None:
                return known
            changes = self.changes
            read = {req_id: row for row, req_id in enumerate(self.req_ids) if req_id is not None}
            if self.changes == changes and self.known is None:
                self.known = read
        raise ConcurrentUseError(
            "batch: its requests change while they are looked up; use it from one thread at a time"
        )

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
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # One whose own __eq__ or __hash__ raises now is still the request of its row.
            row = next((row for row, held in enumerate(self.req_ids) if held is req_id and held is not None), -1)
            if row >= 0:
                self._refuse_from_outside(error, req_id)
                self.known = None  # so that ``remove`` calls none of its code
                return row
            if isinstance(error, KeyError):
                raise ValueError(f"req_id: {quoted(req_id)} is not in the batch") from None
            if isinstance(error, TypeError):
                raise TypeError(
                    f"req_id: {quoted(req_id)} cannot name a request ({one_line(error, MAX_PART)})"
                ) from None
            raise

    def _refuse_from_outside(self, error: BaseException, req_id: Hashable) -> None:
        """Raises ``error`` where the look-up, made again, raises nothing: it was no name's, but a signal handler's."""
        if type(error) is KeyError and error.args and error.args[0] is req_id:
            return  # the mapping's own: another thread was adding the request
        try:
            _ = self.row_of[req_id]
        except KeyboardInterrupt:
            raise
        except BaseException:
            return
        raise error

    def free_row(self) -> int:
        """The row for the next request: the lowest hole, or a new row."""
        return min(self.holes) if self.holes else len(self.req_ids)

    def add(self, req_id: Hashable, row: int) -> None:
        """Puts the request into ``row``, which ``free_row`` returned."""
        self.plain = self.plain and type(req_id) in (str, int)
        if row == len(self.req_ids):
            self.req_ids.append(req_id)
        else:
            self.req_ids[row] = req_id
            self.holes.discard(row)
        self.changes += 1
        self.row_of[req_id] = row

    def remove(self, req_id: Hashable, row: int) -> None:
        """Turns the request's row into a hole."""
        self.req_ids[row] = None
        self.holes.add(row)
        self.paused.discard(row)
        self.drop_last_holes()
        self.changes += 1
        row_of, self.known = self.known, None
        if row_of is not None:
            row_of.pop(req_id, None)
            self.known = row_of

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
            self.changes += 1
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
        """Drops the holes behind the last request, and makes the rest anew: ``holes`` now, ``row_of`` when it is asked.

        A roll-back ends here, and calls no code of the callers' objects, such as a name's ``__eq__``.
        """
        while self.req_ids and self.req_ids[-1] is None:
            self.req_ids.pop()
        self.changes += 1
        self.known = None
        self.holes = {row for row, req_id in enumerate(self.req_ids) if req_id is None}
