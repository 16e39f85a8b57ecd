"""Bidirectional spans on the host: ranges of a request's tokens, checked, and where the span of each token ends.

The tokens of a span, such as those of one image, see each other in both directions; all others see none after them. A
span runs in one step, for what its first token sees of the last has to be in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.quoted import quoted
from attncore.show import counted

_INT32 = npt.NDArray[np.int32]

NONE = np.zeros((0, 2), np.int32)
"""The spans of a request that has none."""


def checked_spans(req_id: Hashable, spans: Any, most: int) -> _INT32:
    """``spans`` of a request as int32[n, 2]: the first token of each, and the one behind its last, of ``most`` tokens.

    ValueError or TypeError that names the request where they are no pairs of integers, where a span has no token or
    lies beyond ``most``, and where they overlap or are not in order.
    """
    name = f"spans: of request {quoted(req_id)}"
    checked: list[tuple[int, int]] = []
    for index, span in enumerate(arguments.items(name, spans, most=most + 1)):
        bounds = arguments.items(f"{name}, at index {index}", span, most=3)
        if len(bounds) != 2:
            raise ValueError(f"{name}: {quoted(span)} at index {index}; give pairs (start, stop) of token positions")
        start, stop = (arguments.integer(f"{name}, at index {index}", bound, 0) for bound in bounds)
        before = checked[-1][1] if checked else 0
        if start >= stop:
            raise ValueError(f"{name}: [{start}, {stop}) has no token; give start < stop")
        if stop > most:
            raise ValueError(f"{name}: [{start}, {stop}) ends behind the {counted(most, 'token')} of max_model_len")
        if start < before:
            raise ValueError(
                f"{name}: [{start}, {stop}) begins before {before}, where the one before it ends; give spans that do "
                "not overlap, in the order of their tokens"
            )
        checked.append((start, stop))
    return np.array(checked, np.int32) if checked else NONE


def cut_span(spans: _INT32, first: int, stop: int) -> tuple[int, int] | None:
    """The span of which tokens ``first:stop`` are a part, or hold one; None where each is among them or is not."""
    for edge in (first, stop):
        index = int(np.searchsorted(spans[:, 1], edge, side="right"))
        if index < len(spans) and spans[index, 0] < edge:
            return int(spans[index, 0]), int(spans[index, 1])
    return None


def write_ends(spans: _INT32, first: int, out: _INT32) -> None:
    """Writes to ``out``, zeros for tokens ``first`` and after it, where the span of each token ends; none is cut."""
    low = int(np.searchsorted(spans[:, 0], first))
    high = int(np.searchsorted(spans[:, 1], first + len(out), side="right"))
    for start, stop in spans[low:high].tolist():
        out[start - first : stop - first] = stop
