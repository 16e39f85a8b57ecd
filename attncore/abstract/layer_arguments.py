"""Arguments of ``backend.impl`` that are no number: a layer's name, and numbers for each query head."""

from __future__ import annotations

import math
from typing import Any

from attncore.arguments import FLOAT32_MAX, is_no_real_number, why_no_list
from attncore.quoted import plain_text, quoted
from attncore.show import counted


def checked_name(layer_name: object) -> str:
    """The name as a plain str; ValueError where it is none."""
    name = plain_text(layer_name)
    if name is None:
        raise ValueError(f"layer_name: {quoted(layer_name)} is not a string; give the layer's name in the model")
    return name


def checked_per_head(name: str, values: Any, num_heads: int) -> Any:
    """``values`` as a list of floats, or the tensor; ValueError where they are not a number of float32 for each query
    head. -inf may be a sink, of weight 0. Those of a tensor are not read, since it may lie on a device.
    """
    if (why := why_no_list(values)) is not None and not hasattr(values, "layout"):
        raise ValueError(f"{name}: {why.replace('integers', 'numbers')}")
    try:
        found = len(values)
    except Exception:  # __len__ may be the caller's code, and a tensor without dimensions has none
        raise ValueError(f"{name}: {quoted(values)} has no length; give a number for each query head") from None
    if found != num_heads:
        raise ValueError(f"{name}: {found} given; the backend has {counted(num_heads, 'query head')}")
    shape = getattr(values, "shape", None)
    if shape is not None:
        if len(shape) != 1:
            raise ValueError(f"{name}: shape {tuple(shape)} given; give one for each query head, {num_heads} in all")
        if is_no_real_number(values):
            raise ValueError(f"{name}: {values.dtype} given, which are no real numbers; give one for each query head")
        if not isinstance(shape, tuple) or hasattr(shape, "numel"):  # a torch.Size
            _check_strided(name, values)
            return values
        values = _numbers(name, values)
    numbers: list[float] = []
    value = values
    try:
        for value in values:
            if isinstance(value, str | bytes | bool) or is_no_real_number(value):
                raise ValueError
            number = float(value)
            if not abs(number) <= FLOAT32_MAX and (name, number) != ("sinks", -math.inf):
                raise ValueError
            numbers.append(number)
    except Exception:
        raise ValueError(
            f"{name}[{len(numbers)}]: {quoted(value)} is not a finite number of float32; give one for each query head"
        ) from None
    return numbers


def _check_strided(name: str, tensor: Any) -> None:
    from attncore.array_arguments import check_tensor  # it imports NumPy

    check_tensor(name, tensor)


def _numbers(name: str, values: Any) -> Any:
    """The numbers of an array of NumPy, as a list."""
    from attncore.array_arguments import as_array

    return as_array(name, values).tolist()
