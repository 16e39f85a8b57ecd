"""Padding of host arrays, as ``fields.FIELDS`` declares it and the kernels write it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.builder.fields import Field, Length, Pad


def pad_array(field: Field, array: npt.NDArray[Any], rows: int, tokens: int, pad_seq_len: int) -> npt.NDArray[Any]:
    """``array`` of a persistent step with ``rows`` and ``tokens`` of padding; ``array`` itself without a pad rule."""
    count = tokens if field.length is Length.TOKEN else rows
    match field.pad:
        case Pad.NONE:
            return array
        case Pad.SEQ_LEN:
            more: Any = np.full(count, pad_seq_len)
        case Pad.REPEAT:
            more = np.full(count, array[-1])
        case Pad.GROW:
            more = array[-1] + pad_seq_len * np.arange(1, count + 1)
        case Pad.LAST_ROW:
            more = np.full(count, (int(array[-1]) if len(array) else -1) + rows)
        case _:
            more = np.full((count, *array.shape[1:]), field.pad)
    return np.concatenate((array, more)).astype(array.dtype, copy=False)
