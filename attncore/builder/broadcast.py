"""Metadata on a rank that did not build it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from attncore.builder.metadata import ARRAY_FIELDS, COUNT_FIELDS, ORDER_FIELDS, CommonAttentionMetadata, identity


def metadata_from_fields(fields: Mapping[str, Any], backend: Any = None) -> CommonAttentionMetadata:
    """The inverse of ``asdict_zerocopy``: metadata of fields that arrived from another rank.

    Arrays are NumPy arrays or torch tensors, which are brought to the host where they lie elsewhere; ``backend`` wraps
    them for its device (None: NumPy). A field that was skipped is an AttributeError of the result. Raises ValueError
    for a field that metadata does not have, and for a count that is missing.
    """
    unknown = sorted(set(fields) - ARRAY_FIELDS - set(COUNT_FIELDS) - set(ORDER_FIELDS))
    if unknown:
        raise ValueError(f"fields: {unknown[0]!r} is no field of metadata")
    missing = [name for name in COUNT_FIELDS if name not in fields]
    if missing:
        raise ValueError(f"fields: {missing[0]!r} is missing; only arrays may be skipped")
    host = SimpleNamespace()
    for name in ARRAY_FIELDS & fields.keys():
        array = fields[name]
        setattr(host, name, np.asarray(array.cpu() if hasattr(array, "cpu") else array))
    values = {name: fields[name] for name in (*COUNT_FIELDS, *ORDER_FIELDS) if name in fields}
    return CommonAttentionMetadata(host, identity if backend is None else backend.from_host, **values)
