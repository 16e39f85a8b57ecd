"""Arguments of ``backend.impl`` that are no number: a layer's name, and numbers for each query head."""

from __future__ import annotations

from typing import Any

from attncore.quoted import plain_text, quoted
from attncore.show import counted


def checked_name(layer_name: object) -> str:
    """The name as a plain str; ValueError where it is none."""
    name = plain_text(layer_name)
    if name is None:
        raise ValueError(f"layer_name: {quoted(layer_name)} is not a string; give the layer's name in the model")
    return name


def check_per_head(name: str, values: Any, num_heads: int) -> None:
    """ValueError where ``values`` are not a number for each query head. Those of a tensor are not read."""
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
        return
    index, value = 0, values
    try:
        for index, value in enumerate(values):  # noqa: B007  the one that fails is named
            if isinstance(value, str | bytes):
                raise ValueError
            float(value)
    except Exception:
        raise ValueError(f"{name}[{index}]: {quoted(value)} is not a number; give one for each query head") from None
