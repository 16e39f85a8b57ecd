"""Objects over memory that kernels write to: copies would share some of it, so that there are none."""

from __future__ import annotations

from typing import Any, NoReturn


class Uncopied:
    """Refuses ``copy`` and ``pickle`` with a TypeError that says what to do instead."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, since kernels hold the addresses of its memory; make "
            "one in each process, and pass requests and block ids"
        )
