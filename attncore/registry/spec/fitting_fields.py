"""The fields of a request that a spec accepts, for trying a backend without a model."""

from __future__ import annotations

from typing import Any

from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import Sizes, largest_to, smallest, smallest_from


def fitting_fields(spec: BackendSpec) -> dict[str, Any]:
    """Fields of a request that ``spec``, as its first variant states it, accepts: all that are needed but heads."""
    stated = spec.by_variant[0][1]
    head_sizes: Sizes = stated.head_sizes  # type: ignore[assignment]
    fields: dict[str, Any] = {
        "head_size": next((size for size in (128, 64) if size in head_sizes), None) or smallest(head_sizes),
        "dtype": next(name for name in ("bfloat16", "float16", "float32") if name in stated.dtypes),
    }
    if "auto" not in stated.kv_cache_dtypes:
        fields["kv_cache_dtype"] = min(stated.kv_cache_dtypes)
    if stated.mla_only:
        fields["use_mla"] = True
        if stated.head_size_v is not None:
            values: Sizes = stated.head_size_v  # type: ignore[assignment]
            if largest_to(values, fields["head_size"]) is None:  # values are the first columns of a row
                fields["head_size"] = smallest_from(head_sizes, smallest(values))
            fields["head_size_v"] = largest_to(values, fields["head_size"])
    if len(stated.phases) == 1:
        fields["phase"] = next(iter(stated.phases))
    return fields
