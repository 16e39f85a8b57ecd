"""Whether a step that no builder of this process made has the fields that a backend reads."""

from __future__ import annotations

from typing import Any

from attncore.builder.fields import ENCODER_ARRAYS, OPTIONAL
from attncore.builder.slices import HostArrays, is_cross


def check_needed_fields(metadata: Any, backend: Any) -> None:
    """ValueError that names a field which the backend's spec declares (``host_needs``, ``device_needs``) and
    ``metadata`` lacks; TypeError for what is no metadata.

    Fields of encoders may be missing from a step without encoder tokens, ``slot_mapping`` from that of a cross group,
    ``tree_mask`` from one without draft trees. ValueError, too, for a step with spans that the backend would not see.
    """
    spec = backend.spec
    if spec is None:
        return
    host = getattr(metadata, "host", None)
    if host is None:
        raise TypeError(f"metadata: {type(metadata).__name__} found, without host arrays; give the metadata of a step")
    if getattr(host, "span_ends", None) is not None and "bidirectional_spans" not in spec.features:
        raise ValueError(
            f"metadata: it holds spans (span_ends), and {backend.name} does not have the feature bidirectional_spans; "
            "choose a backend by a request with features={'bidirectional_spans'}"
        )
    has_encoder = bool(getattr(metadata, "num_encoder_tokens", 0))
    crosses = is_cross(host)
    # What metadata makes of its host arrays is not made here: each field is a copy to the device.
    on_device = host if type(host) is HostArrays else metadata
    for needs, of in (("host_needs", host), ("device_needs", on_device)):
        needed = sorted({*getattr(spec, needs)} - OPTIONAL)
        for name in needed:
            if (name in ENCODER_ARRAYS and not has_encoder) or (name == "slot_mapping" and crosses):
                continue
            if getattr(of, name, None) is None:
                raise ValueError(
                    f"metadata: no field {name}, which {backend.name} reads ({needs}); a step for it must have "
                    f"{', '.join(needed)}"
                )
